"""User errors end a run with one message before training starts."""

import shutil
from pathlib import Path

import pytest

from dllm_reasoning import train_iterative_refine
from dllm_reasoning.trainer.iterative_refine_trainer import IterativeRefineTrainer
from dllm_reasoning.trainer.sft_dataset import IterativeSFTDataset
from tests.dllm_reasoning import runs
from tests.helpers.models import make_tokenizer
from tests.models.families import model_of
from verl.data.rl_dataset import DatasetError
from verl.trainer.fsdp_sft_trainer import run_sft
from verl.trainer.sft.trainer import FSDPSFTTrainer
from verl.utils.tokenizer import hf_tokenizer


def exit_message(config) -> str:
    with pytest.raises(SystemExit) as ended:
        run_sft(config, trainer_class=IterativeRefineTrainer)
    return str(ended.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [(["iterative.loss_weights=[1.0,0.5,0.2]"], "iterative.loss_weights=[1.0, 0.5, 0.2] has 3 weights, but "),
     (["iterative.noise_min=0.8", "iterative.noise_max=0.2"], "noise_min=0.8 is above iterative.noise_max=0.2"),
     (["iterative.noise_pattern=blok"], "iterative.noise_pattern='blok' is unknown; did you mean 'block'?"),
     (["iterative.noise_schedule=sine"], "iterative.noise_schedule='sine' is unknown"),
     (["iterative.num_iterations=0"], "iterative.num_iterations=0 is too small; use 1 or more"),
     (["iterative.noise_token=mask"], "iterative.noise_token=mask, but the tokenizer"),
     (["iterative.self_generate.enable=true", "iterative.self_generate.reward_function.path=nowhere.py"],
      "iterative.self_generate.reward_function: no Python file at 'nowhere.py'"),
     (["iterative.self_generate.enable=true", "iterative.self_generate.reward_function.path=pkg://math"],
      "iterative.self_generate.reward_function: 'pkg://math' has no 'compute_score'"),
     (["iterative.self_generate.enable=true"], "needs iterative.self_generate.reward_function.path"),
     (["+iterative.nois_min=0.1"], "iterative.nois_min")],
)  # fmt: skip
def test_config_errors_name_key_and_fix(assets, tmp_path, overrides, message):
    assert message in exit_message(runs.compose(*assets, tmp_path, *overrides))


BAD = [("2 + 3 =", "5"), ("1 + 1 =", "  "), ("", "5"), ("a " * 40, "b")]


@pytest.mark.parametrize(
    ("row", "more", "message"),
    [(1, [], "row 1: column 'output' is empty; a response needs some text."),
     (2, [], "row 1: column 'instruction' has no tokens"),
     (3, ["data.truncation=right"],
      "row 1: the instruction has 40 tokens, so that data.max_length=24 leaves nothing of the other part")],
)  # fmt: skip
def test_a_bad_row_names_its_file_and_number(assets, tmp_path, row, more, message):
    file = runs.save_rows(tmp_path / "bad.parquet", [BAD[0], BAD[row]])
    output = exit_message(runs.compose(assets[0], file, tmp_path, *more))
    assert f"bad.parquet, {message}" in output


def test_bad_rows_are_skipped_and_counted_by_config(assets, tmp_path, capsys):
    file = runs.save_rows(tmp_path / "bad.parquet", BAD)
    config = runs.compose(assets[0], [file, file], tmp_path, "data.bad_rows=skip")
    tokenizer = IterativeRefineTrainer.build_tokenizer(config)
    dataset = IterativeRefineTrainer.build_dataset(config.data.train_files, config, tokenizer)
    assert len(dataset) == 2 and dataset.skipped == 6
    few = ("data.train_batch_size=2", "data.micro_batch_size_per_gpu=2", "trainer.total_training_steps=1")
    runs.trainer(assets[0], [file, file], tmp_path / "run", "data.bad_rows=skip", *few).fit()
    assert "Over a tenth: 75% of the rows were left out (data.bad_rows" in capsys.readouterr().out
    only_bad = runs.save_rows(tmp_path / "only_bad.parquet", BAD[1:])
    with pytest.raises(DatasetError, match="only_bad.parquet: no row can be trained on"):
        IterativeRefineTrainer.build_dataset(only_bad, config, tokenizer)


def test_chat_template_and_nested_keys(assets, tmp_path):
    import pandas as pd

    file = str(tmp_path / "nested.parquet")
    pd.DataFrame([{"instruction": {"text": "2 + 3"}, "output": {"message": "5"}}]).to_parquet(file)
    config = runs.compose(assets[0], file, tmp_path, "data.use_chat_template=true", "data.prompt_dict_keys=[text]",
                          "data.response_dict_keys=[message]")  # fmt: skip
    tokenizer = IterativeRefineTrainer.build_tokenizer(config)
    [row] = IterativeRefineTrainer.build_dataset(file, config, tokenizer)
    text = tokenizer.decode(row["input_ids"][row["attention_mask"].bool()])
    assert text == "q : 2 + 3 a : 5 <eos>" and int(row["loss_mask"].sum()) == 2


def test_a_tokenizer_without_eos_is_refused(assets, tmp_path):
    config = runs.compose(*assets, tmp_path)
    tokenizer = hf_tokenizer(assets[0])
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="has no eos token; add one to its tokenizer_config.json"):
        IterativeRefineTrainer.build_dataset(assets[1], config, tokenizer)


def test_a_checkpoint_of_another_model_is_refused(assets, tmp_path):
    runs.trainer(*assets, tmp_path / "run", "trainer.total_training_steps=1").fit()
    other = runs.save_model(tmp_path / "other", "qwen3")
    output = exit_message(runs.compose(other, assets[1], tmp_path / "run"))
    assert "does not fit the model" in output
    assert "Check the model's path (model.path; in SFT model.partial_pretrain), model.lora_rank and" in output


def test_a_checkpoint_of_plain_sft_is_refused(assets, tmp_path):
    run = tmp_path / "run"
    runs.trainer(*assets, run, "trainer.total_training_steps=1", cls=FSDPSFTTrainer).fit()
    output = exit_message(runs.compose(*assets, run))
    assert f"trainer.resume_mode=auto, trainer.default_local_dir={run}) was not written by iterative refin" in output
    assert "Name another trainer.default_local_dir, with" in output and "KeyError" not in output


def test_dry_run_reports_what_a_start_would_refuse(assets, tmp_path, capsys):
    unknown = "iterative.noise_token=nosuch"
    with pytest.raises(SystemExit) as ended:
        run_sft(runs.compose(*assets, tmp_path, "trainer.dry_run=true", unknown), trainer_class=IterativeRefineTrainer)
    assert ended.value.code == 1
    assert "iterative.noise_token='nosuch' is not a token of" in capsys.readouterr().out


def test_packed_is_refused_for_layers_of_mixed_kinds(assets, tmp_path, capsys):
    model_of("Gemma 2").save_pretrained(tmp_path / "model")
    make_tokenizer(runs.WORDS).save_pretrained(tmp_path / "model")
    packed = (tmp_path / "model", assets[1], tmp_path / "run", "iterative.noise_pattern=packed")
    message = "iterative.noise_pattern=packed does not work with the model of model.partial_pretrain, which has layers"
    assert message in exit_message(runs.compose(*packed))
    with pytest.raises(SystemExit):
        run_sft(runs.compose(*packed, "trainer.dry_run=true"), trainer_class=IterativeRefineTrainer)
    assert message in capsys.readouterr().out


class NumberedPairs(IterativeSFTDataset):
    """A data set of the user's own."""


def test_a_data_set_of_the_users_own_reads_files_in_shared_memory(assets, tmp_path):
    custom = ("data.use_shm=true", f"data.custom_cls.path=pkg://{__name__}", "data.custom_cls.name=NumberedPairs")
    config = runs.compose(*assets, tmp_path, *custom)
    tokenizer = IterativeRefineTrainer.build_tokenizer(config)
    dataset = IterativeRefineTrainer.build_dataset(assets[1], config, tokenizer)
    assert type(dataset) is NumberedPairs and str(dataset.data_files[0]).startswith("/dev/shm/")
    shutil.rmtree(Path(dataset.data_files[0]).parent)
    custom = ("data.custom_cls.path=pkg://verl.data.sft_dataset", "data.custom_cls.name=SFTDataset")
    assert "SFTDataset is no subclass of IterativeSFTDataset" in exit_message(runs.compose(*assets, tmp_path, *custom))


@pytest.mark.parametrize("override", ["data.multiturn.enable=true", "data.packing=true", "use_remove_padding=true"])
def test_what_rounds_do_not_support_is_refused(assets, tmp_path, override):
    assert f"{override} does not work here: " in exit_message(runs.compose(*assets, tmp_path, override))


def test_the_entry_trains_and_leaves_a_checkpoint(assets, tmp_path, monkeypatch, capsys):
    settings = {
        "model.partial_pretrain": assets[0], "data.train_files": assets[1], "model.fsdp_config.dtype": "float32",
        "data.max_length": 24, "data.train_batch_size": 8, "trainer.device": "cpu", "trainer.logger": "[console]",
        "trainer.total_training_steps": 1, "trainer.report": "false", "trainer.default_local_dir": tmp_path / "run",
        "trainer.n_gpus_per_node": 1,
    }  # fmt: skip
    monkeypatch.setattr("sys.argv", ["train_iterative_refine", *(f"{key}={value}" for key, value in settings.items())])
    train_iterative_refine.main()
    assert (tmp_path / "run" / "global_step_1" / "manifest.json").is_file()
    assert "loss " in capsys.readouterr().out
