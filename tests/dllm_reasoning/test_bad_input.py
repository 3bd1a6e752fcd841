"""What a user gets wrong is said in one sentence before training starts; yaml and dataclasses agree."""

import subprocess
import sys

import pytest
from omegaconf import OmegaConf
from transformers import Gemma2Config, Gemma2ForCausalLM

from dllm_reasoning.config import IterativeRefineConfig
from dllm_reasoning.trainer.iterative_refine_trainer import IterativeRefineTrainer
from tests.dllm_reasoning import runs
from tests.dllm_reasoning.models import warnings_heard
from tests.helpers.models import make_tokenizer
from tests.trainer.config.test_defaults import at, leaves, plain
from verl.trainer.fsdp_sft_trainer import run_sft
from verl.trainer.sft.data import cut
from verl.trainer.sft.plan import refuse_bad_input
from verl.trainer.sft.trainer import FSDPSFTTrainer
from verl.utils.dataset.rl_dataset import DatasetError
from verl.utils.tokenizer import hf_tokenizer

pytestmark = pytest.mark.usefixtures("fresh_group")


def said_by(config) -> str:
    with pytest.raises(SystemExit) as ended:
        run_sft(config, trainer_class=IterativeRefineTrainer)
    return str(ended.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
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
     (["+iterative.nois_min=0.1"], "iterative.nois_min"),
     (["data.prompt_key=question"], "has no column 'question' (columns: instruction, output). Set data.prompt_key"),
     (["data.max_length=4"], "tokens, data.max_length=4. Raise it, or set data.truncation")],
)  # fmt: skip
def test_config_mistakes_name_key_and_mend(place, tmp_path, overrides, said):
    assert said in said_by(runs.compose(*place, tmp_path, *overrides))


BAD = [("2 + 3 =", "5"), ("1 + 1 =", "  "), ("", "5"), ("a " * 40, "b")]


@pytest.mark.parametrize(
    ("row", "more", "said"),
    [(1, [], "row 1: column 'output' is empty; a response needs some text."),
     (2, [], "row 1: column 'instruction' has no tokens"),
     (3, [], "row 1: the sample has 42 tokens, data.max_length=24. Raise it, or set data.truncation"),
     (3, ["data.truncation=right"], "row 1: the instruction has 40 tokens, data.max_length=24 leaves no room")],
)  # fmt: skip
def test_a_bad_row_names_its_file_and_number(place, tmp_path, row, more, said):
    file = runs.save_rows(tmp_path / "bad.parquet", [BAD[0], BAD[row]])
    told = said_by(runs.compose(place[0], file, tmp_path, *more))
    assert f"bad.parquet, {said}" in told


def test_bad_rows_are_skipped_and_counted_by_config(place, tmp_path):
    file = runs.save_rows(tmp_path / "bad.parquet", BAD)
    config = runs.compose(place[0], [file, file], tmp_path, "data.bad_rows=skip")
    tokenizer = IterativeRefineTrainer.build_tokenizer(config)
    dataset = IterativeRefineTrainer.build_dataset(config.data.train_files, config, tokenizer)
    assert len(dataset) == 2 and dataset.skipped == 6
    only_bad = runs.save_rows(tmp_path / "only_bad.parquet", BAD[1:])
    with pytest.raises(DatasetError, match="only_bad.parquet: no row can be trained on"):
        IterativeRefineTrainer.build_dataset(only_bad, config, tokenizer)


def test_truncation_keeps_the_side_it_says(place, tmp_path):
    file = runs.save_rows(tmp_path / "long.parquet", [(" ".join("abcdefgh"), " ".join("ijklmnop"))])
    tokenizer = hf_tokenizer(place[0])
    whole = tokenizer(" ".join("abcdefghijklmnop"))["input_ids"] + [2]
    for how, kept, learned in (("left", whole[-12:], 9), ("right", whole[:12], 4)):
        config = runs.compose(place[0], file, tmp_path, "data.max_length=12", f"data.truncation={how}")
        [row] = IterativeRefineTrainer.build_dataset(file, config, tokenizer)
        assert row["input_ids"].tolist() == kept and int(row["loss_mask"].sum()) == learned


def test_chat_template_and_nested_keys(place, tmp_path):
    import pandas as pd

    file = str(tmp_path / "nested.parquet")
    pd.DataFrame([{"instruction": {"text": "2 + 3"}, "output": {"said": "5"}}]).to_parquet(file)
    config = runs.compose(place[0], file, tmp_path, "data.use_chat_template=true", "data.prompt_dict_keys=[text]",
                          "data.response_dict_keys=[said]")  # fmt: skip
    tokenizer = IterativeRefineTrainer.build_tokenizer(config)
    [row] = IterativeRefineTrainer.build_dataset(file, config, tokenizer)
    text = tokenizer.decode(row["input_ids"][row["attention_mask"].bool()])
    assert text == "q : 2 + 3 a : 5 <eos>" and int(row["loss_mask"].sum()) == 2


def test_a_tokenizer_without_eos_is_refused(place, tmp_path):
    config = runs.compose(*place, tmp_path)
    tokenizer = hf_tokenizer(place[0])
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="has no eos token; add one to its tokenizer_config.json"):
        IterativeRefineTrainer.build_dataset(place[1], config, tokenizer)


def test_a_checkpoint_of_another_model_is_refused(place, tmp_path):
    runs.trainer_of(runs.compose(*place, tmp_path / "run", "trainer.total_training_steps=1")).fit()
    runs.leave_group()
    other = runs.save_model(tmp_path / "other", "qwen3")
    told = said_by(runs.compose(other, place[1], tmp_path / "run"))
    assert "does not fit the model" in told
    assert "Check the model's path (model.path; in SFT model.partial_pretrain), model.lora_rank and" in told
    runs.leave_group()
    wider = runs.save_model(tmp_path / "wider", hidden_size=64)
    told = said_by(runs.compose(wider, place[1], tmp_path / "run"))
    assert "does not fit the model" in told and "is (48, 32) there, (48, 64) here. Check the model's path" in told


def test_a_checkpoint_of_plain_sft_is_refused(place, tmp_path):
    run = tmp_path / "run"
    runs.trainer_of(runs.compose(*place, run, "trainer.total_training_steps=1"), FSDPSFTTrainer).fit()
    runs.leave_group()
    told = said_by(runs.compose(*place, run))
    assert f"trainer.resume_mode=auto, trainer.default_local_dir={run}) was not written by iterative refinement" in told
    assert "Name another trainer.default_local_dir, with" in told and "KeyError" not in told


def test_dry_run_prints_a_plan_and_trains_nothing(place, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        run_sft(runs.compose(*place, tmp_path / "run", "trainer.dry_run=true"), trainer_class=IterativeRefineTrainer)
    assert ended.value.code == 0 and not (tmp_path / "run").exists()
    assert "steps in all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "said"),
    [("iterative.noise_token=mask", "iterative.noise_token=mask, but the tokenizer"),
     ("iterative.noise_token=nosuch", "iterative.noise_token='nosuch' is no token of"),
     ("iterative.self_generate={enable:true,reward_function:{path:nowhere.py}}", "no Python file at 'nowhere.py'")],
)  # fmt: skip
def test_dry_run_finds_what_a_start_would_refuse(place, tmp_path, capsys, override, said):
    with pytest.raises(SystemExit) as ended:
        run_sft(runs.compose(*place, tmp_path, "trainer.dry_run=true", override), trainer_class=IterativeRefineTrainer)
    assert ended.value.code == 1 and said in capsys.readouterr().out


def test_packed_is_refused_for_layers_of_mixed_kinds(place, tmp_path, capsys):
    shape = dict(vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=8, sliding_window=6, eos_token_id=2)  # fmt: skip
    Gemma2ForCausalLM(Gemma2Config(**shape)).save_pretrained(tmp_path / "model")
    make_tokenizer(runs.WORDS).save_pretrained(tmp_path / "model")
    packed = (tmp_path / "model", place[1], tmp_path / "run", "iterative.noise_pattern=packed")
    said = "iterative.noise_pattern=packed does not work with the model of model.partial_pretrain, which has layers"
    assert said in said_by(runs.compose(*packed))
    with pytest.raises(SystemExit):
        run_sft(runs.compose(*packed, "trainer.dry_run=true"), trainer_class=IterativeRefineTrainer)
    assert said in capsys.readouterr().out


UNREAD = ("data.use_shm=true", "data.multiturn.messages_key=turns", "data.packing=true", "use_remove_padding=true",
          "data.custom_cls.path=pkg://json")  # fmt: skip


def test_keys_without_effect_are_named_and_have_none(place, tmp_path, capsys):
    config = runs.compose(*place, tmp_path, *UNREAD)
    with warnings_heard() as heard:
        refuse_bad_input(config, IterativeRefineTrainer)
    assert [any(f"{key} has no effect in this version: " in text for text in heard) for key in UNREAD] == [True] * 5
    trainer = runs.trainer_of(config)
    assert not trainer.policy.remove_padding and len(cut(trainer._draw(), trainer.config.data)) == 2
    with pytest.raises(SystemExit):
        run_sft(runs.compose(*place, tmp_path, *UNREAD, "trainer.dry_run=true"), trainer_class=IterativeRefineTrainer)
    told = capsys.readouterr().out
    assert all(f"{key} has no effect in this version: " in told for key in UNREAD)


def test_yaml_and_dataclasses_agree_key_by_key():
    config = runs.compose_ppo(config_dir=runs.CONFIG_DIR, config_name="iterative_refine")
    tree = OmegaConf.to_container(config, resolve=True)
    default, compared = plain(IterativeRefineConfig()), 0
    for path, value in leaves({name: tree[name] for name in ("data", "model", "optim", "iterative", "trainer")}):
        if path.endswith("_target_"):
            continue
        assert at(default, path) == value, path
        compared += 1
    assert compared > 80


@pytest.mark.slow
def test_run_train_starts_ranks_and_leaves_a_checkpoint(place, tmp_path):
    settings = [f"{key}={value}" for key, value in {
        "model.partial_pretrain": place[0], "data.train_files": place[1], "model.fsdp_config.dtype": "float32",
        "data.max_length": 24, "data.train_batch_size": 8, "trainer.device": "cpu", "trainer.logger": "[console]",
        "trainer.total_training_steps": 1, "trainer.report": "false",
    }.items()]  # fmt: skip
    import os

    done = subprocess.run(["bash", "dllm_reasoning/scripts/run_train.sh", "1", str(tmp_path / "run"), *settings],
                          env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "train/loss_s1:" in done.stdout and (tmp_path / "run" / "global_step_1" / "manifest.json").is_file()
    usage = subprocess.run(["bash", "dllm_reasoning/scripts/run_train.sh"], capture_output=True, text=True)
    assert usage.returncode == 2 and "RANKS CHECKPOINT_DIR" in usage.stderr
