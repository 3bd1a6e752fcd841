"""Plans of SFT: published command lines pass, mistakes get one sentence."""

import importlib.util
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
from hydra import compose, initialize_config_module
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.helpers.engines import make_engine
from tests.helpers.logs import logged
from tests.helpers.sft_run import compose_sft, overrides, write_pairs
from verl.config.compose import forced_override
from verl.planning.checks import row_problems
from verl.planning.sft import refuse_bad_rows, sft_entry
from verl.trainer import fsdp_sft_trainer
from verl.trainer.fsdp_sft_trainer import run_sft
from verl.trainer.sft.trainer import FSDPSFTTrainer
from verl.utils.problems import ConfigError

GSM8K = """
data.prompt_key=extra_info data.response_key=extra_info data.prompt_dict_keys=['question']
+data.response_dict_keys=['answer'] trainer.default_local_dir=SAVE trainer.project_name=gsm8k-sft
"""
SP = "ulysses_sequence_parallel_size=2 use_remove_padding=true"
CONVERSATIONS = """
data.multiturn.enable=true data.multiturn.messages_key=messages data.micro_batch_size=4
trainer.default_local_dir=SAVE trainer.project_name=multiturn-sft trainer.experiment_name=multiturn-sft-qwen
trainer.logger=console trainer.total_training_steps=1 trainer.default_hdfs_dir=null
"""
# Settings of verl 0.7.0's published SFT command lines; model and data paths are ours.
PUBLISHED = {
    "peft_named_layers": GSM8K + """model.lora_rank=32 model.lora_alpha=16 +model.strategy=fsdp
        model.target_modules=[q_proj,v_proj] trainer.logger=['console']""",
    "sp": GSM8K + SP + """ optim.lr=1e-4 data.micro_batch_size=4 trainer.experiment_name=gsm8k-sft-qwen-sp2
        trainer.logger=console trainer.total_training_steps=1 trainer.default_hdfs_dir=null""",
    "liger": GSM8K + SP + """ optim.lr=1e-4 data.micro_batch_size=4 model.use_liger=True trainer.logger=console
        trainer.total_training_steps=1 trainer.experiment_name=gsm8k-sft-qwen-liger""",
    "multiturn": CONVERSATIONS + SP,
    "checkpoints": GSM8K + """data.train_batch_size=32 trainer.save_freq=50 trainer.test_freq=-1 trainer.seed=1
        trainer.max_ckpt_to_keep=5 trainer.resume_mode=auto trainer.total_epochs=2 data.max_length=2048
        data.truncation=right data.balance_dp_token=False model.enable_gradient_checkpointing=True
        model.fsdp_config.cpu_offload=False model.fsdp_config.offload_params=False optim.lr_scheduler=wsd
        optim.lr_warmup_steps_ratio=0.05 optim.weight_decay=0.1 optim.betas=[0.9,0.95] optim.clip_grad=1.0
        trainer.checkpoint.save_contents=['model','optimizer','extra','hf_model'] trainer.nnodes=1""",
}  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Files with the columns of the published preparation scripts."""
    folder = tmp_path_factory.mktemp("published")
    turns = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    info = {"question": "1 + 1", "answer": "2", "index": 0, "split": "train"}
    rows = [{"data_source": "openai/gsm8k", "prompt": turns[:1], "extra_info": info, "messages": turns}] * 300
    for name in ("train", "val"):
        pd.DataFrame(rows).to_parquet(folder / f"{name}.parquet")
    return folder


def planned(published, model, settings, capsys, files=None):
    given = [forced_override(s.replace("SAVE", str(published / "out")), groups=False) for s in settings.split()]
    given += [f"data.{s}_files={files or published}/{s}.parquet" for s in ("train", "val")]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("sft_trainer", overrides=[*given, f"model.partial_pretrain={model}"])
        code = sft_entry(FSDPSFTTrainer).dry_run(config, compose("sft_trainer"))
    return code, capsys.readouterr().out


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_command_passes(published, tiny_llama, name, capsys):
    code, text = planned(published, tiny_llama, PUBLISHED[name], capsys)
    assert code == 0 and "Wrong on every machine: 0" in text, text[-3000:]
    batch = 32 if name == "checkpoints" else 256
    assert f"steps per epoch               │ {300 // batch}" in text and "Memory of one rank" in text


def test_the_old_micro_batch_size_counts_the_samples_of_all_ranks(published, tiny_llama, capsys):
    """8 ranks, of which two neighbours compute on the same rows: 4 groups."""
    text = planned(published, tiny_llama, PUBLISHED["sp"], capsys)[1]
    assert "64 of 1 samples" in text and "Warnings: 0" in text
    code, text = planned(published, tiny_llama, PUBLISHED["sp"] + " data.micro_batch_size=6", capsys)
    said = "data.micro_batch_size=6 cannot be shared evenly by 4 groups of ranks. Set data.micro_batch_size_per_gpu=1"
    assert code == 1 and said in text


def test_copies_for_a_save_in_the_background_are_in_the_plan_of_a_cpu(published, tiny_llama, capsys):
    on_cpu = f"{GSM8K} trainer.device=cpu trainer.checkpoint.async_save="
    assert "copies for a save in the background" in planned(published, tiny_llama, on_cpu + "true", capsys)[1]
    assert "copies for a save in the background" not in planned(published, tiny_llama, on_cpu + "false", capsys)[1]


def test_kernels_of_liger_need_their_package_and_a_gpu(published, tiny_llama, capsys, monkeypatch):
    real = importlib.util.find_spec
    spec = lambda name, *a: None if name == "liger_kernel" else real(name, *a)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", spec)
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: False)
    code, text = planned(published, tiny_llama, PUBLISHED["liger"], capsys)
    assert code == 0 and "model.use_liger=true: the package liger-kernel is not installed here" in text
    code, text = planned(published, tiny_llama, PUBLISHED["liger"] + " trainer.device=cpu", capsys)
    assert code == 1 and "model.use_liger=true needs GPUs for its kernels, and trainer.device=cpu" in text
    with pytest.raises(ImportError, match="liger-kernel"):
        make_engine(tiny_llama, use_liger=True)


@pytest.mark.parametrize(("settings", "said"), [
    ("data.train_batch_size=12", "data.train_batch_size=12 cannot be shared evenly by 8 ranks. Use a multiple of 8."),
    ("data.prompt_key=extra_inf", "train.parquet, row 0: there is no column 'extra_inf'"),
    ("data.prompt_key=question data.prompt_dict_keys=null",
     "there is no column 'question', but conversations in 'messages'. Set data.multiturn.enable=true."),
    ("optim.betas=[0.9]", "optim.betas=[0.9] must be two numbers"),
    ("model.external_lib=no_such_module", "model.external_lib=no_such_module cannot be imported"),
    ("model.fsdp_config.fsdp_size=0", "model.fsdp_config.fsdp_size=0 is not a group size; use -1 for all ranks"),
    ("model.fsdp_config.fsdp_size=3", "model.fsdp_config.fsdp_size=3 does not divide the 8 ranks"),
])  # fmt: skip
def test_what_cannot_work_is_wrong(published, tiny_llama, settings, said, capsys):
    code, text = planned(published, tiny_llama, f"{GSM8K} {settings}", capsys)
    assert code == 1 and said in text, text[-2000:]


@pytest.mark.parametrize(("settings", "key"), [
    ("", "micro_batch_size_per_gpu"), ("data.micro_batch_size=16", "micro_batch_size"),
    ("data.packing=true use_remove_padding=true", "micro_batch_size_per_gpu"),
    ("data.packing=true use_remove_padding=true data.max_token_len_per_gpu=4096", "max_token_len_per_gpu"),
])  # fmt: skip
def test_too_little_memory_names_the_size_that_the_run_reads(published, tiny_llama, settings, key, capsys, monkeypatch):
    monkeypatch.setattr("verl.planning.machine.available_memory", lambda: 1 << 20)
    _, text = planned(published, tiny_llama, f"{GSM8K} trainer.device=cpu {settings}", capsys)
    assert f"lower data.{key}, lower trainer.n_gpus_per_node." in text


def cut_files(tmp_path, conversations):
    """half: the question of every odd row fills data.max_length; all: that of every row; none: the rows are short."""
    def row(i, is_cut):
        question, answer = "3 + " * 20 * is_cut + f"{i} =", str(i)
        if not conversations:
            return {"question": question, "answer": answer}
        turns = (("user", question), ("assistant", answer))
        return {"messages": [{"role": role, "content": text} for role, text in turns]}

    for name, is_cut in (("half", lambda i: i % 2), ("all", lambda i: 1), ("none", lambda i: 0)):
        pd.DataFrame([row(i, is_cut(i)) for i in range(16)]).to_parquet(tmp_path / f"{name}.parquet")
    more = {"data__multiturn__enable": "true", "data__multiturn__messages_key": "messages"} if conversations else {}
    return more | {"data__truncation": "right"}


@pytest.mark.parametrize("conversations", [False, True])
def test_rows_whose_answer_is_cut_away_are_counted_and_a_set_of_them_is_refused(
    tmp_path, tiny_llama, conversations, capsys
):
    more = cut_files(tmp_path, conversations)

    def planned_with(train, val):
        files = {f"data__{split}_files": tmp_path / f"{n}.parquet" for split, n in (("train", train), ("val", val))}
        return compose_sft(tmp_path, tiny_llama, **files, **more)

    said = "data.{}_files: rows have no learned token within data.max_length and train nothing: {}/half.parquet: "
    assert sft_entry(FSDPSFTTrainer).dry_run(planned_with("half", "half")) == 0
    text = " ".join(capsys.readouterr().out.split())
    for split in ("train", "val"):
        assert f"{said.format(split, tmp_path)}8 of 16, the first is row 1. Raise data.max_length" in text
    assert sft_entry(FSDPSFTTrainer).dry_run(planned_with("none", "none")) == 0
    assert "Warnings: 0" in capsys.readouterr().out
    none = "data.{}_files: none of its 16 rows has a learned token within data.max_length: nothing can be learned"
    for split, names in (("train", ("all", "none")), ("val", ("none", "all"))):
        config = planned_with(*names)
        assert sft_entry(FSDPSFTTrainer).dry_run(config) == 1
        assert none.format(split) in " ".join(capsys.readouterr().out.split())
        with pytest.raises(SystemExit) as ended:
            run_sft(config)
        assert none.format(split) in str(ended.value.code) and not (tmp_path / "out").exists()
        assert str(ended.value.code).endswith("Raise data.max_length, or set data.truncation=left.")


def test_a_truncation_that_is_set_is_not_advised():
    class Rows(list):
        truncation = "left"

    (problem,) = row_problems(Rows([{}]), "data.train_files", 4, lambda row: None, learns=lambda row: False)
    assert problem.message.endswith("nothing can be learned. Raise data.max_length.")


def test_a_start_warns_of_the_rows_that_it_checks_and_reads_on_where_none_of_them_learns(
    tmp_path, tiny_llama, monkeypatch
):
    more = cut_files(tmp_path, False)
    config = compose_sft(tmp_path, tiny_llama, data__train_files=tmp_path / "half.parquet", **more)
    tokenizer = FSDPSFTTrainer.build_tokenizer(config)
    rows = FSDPSFTTrainer.build_dataset(config.data.train_files, config, tokenizer)
    monkeypatch.setattr("verl.planning.checks.ROWS_AT_START", 4)
    with logged() as lines:
        refuse_bad_rows(rows, "data.train_files")
        rows._keep([1, 3, 5, 7, 0])
        refuse_bad_rows(rows, "data.train_files")  # the fifth row has a learned token
    for line, count in zip(lines, (2, 4), strict=True):
        assert f"half.parquet: {count} of 4 checked ones, the first is row 1." in line
    rows._keep([0, 1, 2, 3])
    rows.rows = [rows.rows[0]] * 4
    with pytest.raises(ConfigError, match="none of its 4 rows has a learned token"):
        refuse_bad_rows(rows, "data.train_files")


def test_rows_that_keep_a_part_of_their_answer_are_counted_as_cut(tmp_path, tiny_llama):
    pairs = [{"question": "1 +", "answer": "2 " * (30 if i == 2 else 3)} for i in range(4)]
    pd.DataFrame(pairs).to_parquet(tmp_path / "train.parquet")
    config = compose_sft(tmp_path, tiny_llama, data__train_files=tmp_path / "train.parquet", data__truncation="right")
    rows = FSDPSFTTrainer.build_dataset(config.data.train_files, config, FSDPSFTTrainer.build_tokenizer(config))
    (problem,) = row_problems(rows, "data.train_files", 200, lambda row: None, lambda row: True)
    assert problem.kind == "unused" and "cut by data.truncation=right" in problem.message
    assert "train.parquet: 1 of 4, the first is row 2. Raise data.max_length." in problem.message


@pytest.mark.parametrize(("more", "said"), [
    ({"model__partial_pretrain": "/no/such/folder"}, "model.partial_pretrain=/no/such/folder: the folder does"),
    ({"data__max_length": 4}, "row 0: the sample has 10 tokens, data.max_length=4"),
    ({"data__chat_template": "/no.jinja"}, "data.chat_template=/no.jinja cannot be read: No such file or directory."),
    ({"data__train_files": "/no/file.parquet"}, "/no/file.parquet: file does not exist"),
    ({"trainer__default_local_dir": "/dev/null/run"}, "trainer.default_local_dir: /dev/null/run cannot be written: "
     "/dev/null is not a folder. Name another folder."),
])  # fmt: skip
def test_a_start_with_a_mistake_ends_with_its_message(tmp_path, tiny_llama, more, said):
    config = compose_sft(write_pairs(tmp_path), tiny_llama, **more)
    with pytest.raises(SystemExit) as ended:
        run_sft(config)
    assert said in str(ended.value.code)
    assert not (tmp_path / "out").exists()


def test_memory_of_all_cpu_ranks_and_room_for_the_checkpoints_are_those_of_this_machine(
    tmp_path, tiny_llama, capsys, monkeypatch
):
    monkeypatch.setattr("verl.planning.machine.available_memory", lambda: 1 << 30)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1 << 20))
    config = compose_sft(write_pairs(tmp_path), tiny_llama, trainer__n_gpus_per_node=2, trainer__save_freq=2,
                         data__micro_batch_size_per_gpu=2)  # fmt: skip
    assert sft_entry(FSDPSFTTrainer).dry_run(config) == 0
    text = " ".join(capsys.readouterr().out.split())
    # two processes of 600 MiB; 6 steps, 12 bytes for each of 82 thousand parameters
    assert "2 ranks (trainer.n_gpus_per_node) need about 1.2 GiB of memory, and this machine has 1.0 GiB avail" in text
    assert "the run has up to 3 checkpoints of 0.00 GiB at a time, and 0.00 GiB are free" in text


@pytest.mark.parametrize("rank", ["0", "1"])
def test_torchrun_repeats_the_message(tmp_path, tiny_llama, monkeypatch, rank):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", file := str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit):
        run_sft(compose_sft(write_pairs(tmp_path), tiny_llama, model__lora_rank=-1))
    report = str(ChildFailedError("sft", {int(rank): ProcessFailure(int(rank), 1, 1, file)}))
    assert "lora_rank=-1 is too small" in report.partition("Root Cause")[2]


def test_the_entry_runs_a_command_line(tmp_path, tiny_llama, monkeypatch, capsys):
    settings = overrides(write_pairs(tmp_path), tiny_llama, trainer__dry_run="true")
    monkeypatch.setattr(sys, "argv", ["fsdp_sft_trainer", *settings, "use_remove_padding=true", "+data.max_lenght=3"])
    with pytest.raises(SystemExit) as ended:
        fsdp_sft_trainer.main()
    text = capsys.readouterr().out
    assert ended.value.code == 1 and "data.max_lenght is not a known key; did you mean data.max_length?" in text
