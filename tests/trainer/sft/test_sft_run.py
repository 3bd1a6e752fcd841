"""A whole SFT run: resumed bit for bit, stopped, exported."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.engines import weights_of
from tests.helpers.sft_run import make_trainer, metric_rows, overrides, write_pairs
from tests.helpers.watched_runs import CANARY, SECRETS, family, files_with_secrets, listening, wait_until
from verl.trainer.run.failure import NonFiniteRun
from verl.training.checkpoint.publish import published_steps, verify_manifest

ROOT = Path(__file__).resolve().parents[3]
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the trainer's sees it."""


def killed_after(trainer, step):
    """Ends the run in the step behind `step`, with its work half done."""
    inner = trainer.training_step

    def training_step(batch):
        if trainer.global_steps > step:
            raise Killed
        return inner(batch)

    trainer.training_step = training_step
    with pytest.raises(Killed):
        trainer.fit()


def dropout_model(tiny_llama, tmp_path):
    """A model whose forward draws random numbers, so that a resume must restore them."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model.config.attention_dropout = 0.1
    model.save_pretrained(tmp_path / "dropout")
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(tmp_path / "dropout")
    return str(tmp_path / "dropout")


@pytest.mark.process
@pytest.mark.parametrize(("saved", "killed", "more"), [
    (2, 3, {}), (3, 3, {"data__packing": "true"}), (1, 1, {"data__dataloader_num_workers": 1}),
], ids=["within an epoch", "between epochs", "with a reading process"])  # fmt: skip
def test_a_killed_run_is_resumed_bit_for_bit(tmp_path, tiny_llama, saved, killed, more):
    model = dropout_model(tiny_llama, tmp_path)
    more = {"trainer__save_freq": saved, "trainer__test_freq": 2, **more}
    whole = make_trainer(write_pairs(tmp_path / "whole"), model, **more)
    before = torch.get_rng_state()
    whole.fit()
    assert not torch.equal(before, torch.get_rng_state())
    torch.manual_seed(99)  # what the second process finds
    killed_after(make_trainer(write_pairs(tmp_path / "cut"), model, **more), killed)
    torch.manual_seed(98)
    again = make_trainer(tmp_path / "cut", model, **more)
    again.fit()
    assert metric_rows(tmp_path / "cut") == metric_rows(tmp_path / "whole")
    rows = metric_rows(tmp_path / "cut")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "val/loss" in row] == [0, 2, 4, 6]
    untrained = AutoModelForCausalLM.from_pretrained(model)
    losses, learned = 0.0, 0
    for row in whole.val_loader.dataset.dataset:  # without dropout and packing
        ids, counted = row["input_ids"][None], row["loss_mask"][None, 1:].bool()
        with torch.no_grad():
            log_probs = untrained.eval()(ids, attention_mask=row["attention_mask"][None]).logits[:, :-1].log_softmax(-1)
        losses -= float(log_probs.gather(-1, ids[:, 1:, None])[..., 0][counted].sum())
        learned += int(counted.sum())
    assert rows[0] == {"step": 0, "val/loss": pytest.approx(losses / learned, rel=1e-5)}
    weights = weights_of(whole.engine)
    assert all((weights[name] == after).all() for name, after in weights_of(again.engine).items())
    assert again.best == whole.best and published_steps(tmp_path / "cut" / "out")[-1] == 6


def test_other_data_is_refused_at_a_resume(tmp_path, tiny_llama):
    write_pairs(tmp_path)
    make_trainer(tmp_path, tiny_llama, trainer__total_training_steps=1).fit()
    with open(tmp_path / "train.jsonl", "a") as f:
        f.write(json.dumps({"question": "1", "answer": "2"}) + "\n")
    with pytest.raises(ValueError, match="the training data or its batches changed since the checkpoint was written"):
        make_trainer(tmp_path, tiny_llama).fit()
    again = make_trainer(tmp_path, tiny_llama, trainer__allow_data_change="true", trainer__total_training_steps=2)
    again.fit()
    assert again.global_steps == 2


def test_a_run_whose_steps_are_all_skipped_ends(tmp_path, tiny_llama):
    trainer = make_trainer(write_pairs(tmp_path), tiny_llama, trainer__nonfinite_steps_max=2)
    trainer.summed_loss = lambda micro: torch.tensor(float("nan"), requires_grad=True)
    with pytest.raises(NonFiniteRun, match="in 2 steps in a row .*Lower optim.lr"):
        trainer.fit()
    assert [row.get("train/skipped_steps") for row in metric_rows(tmp_path)] == [None, 1, 1]


def test_a_run_whose_few_steps_are_all_skipped_is_no_success(tmp_path, tiny_llama):
    """Fewer steps than trainer.nonfinite_steps_max."""
    trainer = make_trainer(write_pairs(tmp_path), tiny_llama, trainer__total_training_steps=2)
    inner = trainer._draw
    trainer._draw = lambda: (batch := inner()).set("loss_mask", torch.zeros_like(batch["loss_mask"]))
    with pytest.raises(NonFiniteRun, match="or no token was learned, in every one of the 2 steps; they were skipped"):
        trainer.fit()
    assert [row.get("train/rows_without_target") for row in metric_rows(tmp_path)] == [None, 1, 1]


def test_the_last_lines_and_the_report_name_the_share_of_rows_that_trained_nothing(tmp_path, tiny_llama, capsys):
    more = {"trainer__report": "true", "trainer__total_training_steps": 2}
    trainer = make_trainer(write_pairs(tmp_path), tiny_llama, **more)
    inner, count = trainer._draw, iter((2, 3))  # of 8 rows

    def drawn():
        batch = inner()
        batch["loss_mask"][: next(count)] = 0
        return batch

    trainer._draw = drawn
    trainer.fit()
    said = "31% of the rows have no learned token within data.max_length (train/rows_without_target)."
    lines = capsys.readouterr().out.splitlines()
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"Over a tenth: {said}" in lines[-2:] and said in page and "Policy loss" not in page
    assert all(f">{name}" in page for name in ("Loss<", "Validation<", "skipped steps<"))


def test_the_last_lines_name_the_share_of_validation_rows_without_a_learned_token(tmp_path, tiny_llama, capsys):
    """2 of 5 rows, whose questions fill data.max_length."""
    write_pairs(tmp_path)
    rows = [{"question": " ".join(["1"] * (30 if i < 2 else 1)), "answer": "2"} for i in range(5)]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = make_trainer(tmp_path, tiny_llama, trainer__total_training_steps=1, data__truncation="right")
    trainer.fit()
    assert [row["val/rows_without_target"] for row in metric_rows(tmp_path)] == pytest.approx([0.4, 0.4])
    said = "40% of the validation rows have no learned token within data.max_length (val/rows_without_target)."
    assert f"Over a tenth: {said}" in capsys.readouterr().out and set(trainer.best) == {"val/loss"}


def test_the_model_is_not_validated_before_its_training_where_that_is_off_or_without_validation_files(
    tmp_path, tiny_llama
):
    off = {"trainer__val_before_train": "false", "trainer__total_training_steps": 1}
    make_trainer(write_pairs(tmp_path), tiny_llama, **off).fit()
    assert [row["step"] for row in metric_rows(tmp_path)] == [1]
    trainer = make_trainer(write_pairs(tmp_path / "no"), tiny_llama, trainer__total_training_steps=1)
    trainer.val_loader = None  # what the entry's val_dataset=None gives
    trainer.fit()
    assert [row["step"] for row in metric_rows(tmp_path / "no")] == [1]


def test_a_full_model_is_exported_for_plain_transformers(tmp_path, tiny_llama):
    contents = "[model,optimizer,extra,hf_model]"
    trainer = make_trainer(write_pairs(tmp_path), tiny_llama, trainer__checkpoint__save_contents=contents)
    trainer.fit()
    folder = tmp_path / "out" / "global_step_6"
    verify_manifest(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder / "huggingface")
    with torch.no_grad(), trainer.engine.eval_mode():
        ours = trainer.engine.module(IDS, use_cache=False).logits
        assert torch.equal(plain(IDS).logits, ours)
        assert not torch.allclose(AutoModelForCausalLM.from_pretrained(tiny_llama)(IDS).logits, ours, atol=1e-2)
    assert AutoTokenizer.from_pretrained(folder / "huggingface").chat_template == trainer.tokenizer.chat_template


def test_an_adapter_is_exported_for_plain_peft_and_merged_for_plain_transformers(tmp_path, tiny_llama):
    more = {"model__lora_rank": 4, "trainer__checkpoint__save_contents": "[model,optimizer,extra,hf_model]"}
    trainer = make_trainer(write_pairs(tmp_path), tiny_llama, **more)
    trainer.fit()
    folder = tmp_path / "out" / "global_step_6"
    trained = load_file(folder / "lora_adapter" / "adapter_model.safetensors")
    assert all("lora_" in name for name in trained) and any(t.abs().max() > 0 for n, t in trained.items() if "_B" in n)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with torch.no_grad(), trainer.engine.eval_mode():
        ours = trainer.engine.module(input_ids=IDS, use_cache=False).logits
        without = base(IDS).logits
        adapted = PeftModel.from_pretrained(base, folder / "lora_adapter").eval()
        merged = AutoModelForCausalLM.from_pretrained(folder / "huggingface")
        torch.testing.assert_close(adapted(input_ids=IDS).logits, ours, atol=1e-6, rtol=0)
        torch.testing.assert_close(merged(IDS).logits, ours, atol=1e-5, rtol=0)
        assert (without - ours).abs().max() > 1e-2
    again = make_trainer(tmp_path, tiny_llama, **more)  # and its own checkpoint holds nothing but the adapter
    again.load_checkpoint()
    assert again.global_steps == 6


def started(directory, model, *more, ranks=None, **environment):
    """The entry as a user starts it, with torchrun where `ranks` are given; its output goes to directory/log."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, "-m", "verl.trainer.fsdp_sft_trainer"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    settings = overrides(directory, model, trainer__total_epochs=2000)
    with open(directory / "log", "w") as log:
        return subprocess.Popen(
            [*command, *settings, *more], env=environment, cwd=directory, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


@pytest.mark.process
@pytest.mark.slow
def test_sigterm_of_the_group_finishes_the_step_saves_and_exits_with_143(tmp_path, tiny_llama):
    """As `timeout` sends it: the processes of the data loader get it too."""
    run = started(write_pairs(tmp_path), tiny_llama, "data.dataloader_num_workers=2")
    out = tmp_path / "out"
    loaders = []

    def trains_with_loaders():
        # Between two epochs the loader's processes are gone for a moment. The first row is that of the validation.
        loaders[:] = psutil.Process(run.pid).children()
        return len(loaders) >= 2 and (out / "metrics.jsonl").exists() and len(metric_rows(tmp_path)) > 1

    wait_until(trains_with_loaders, run, tmp_path / "log")
    os.killpg(run.pid, signal.SIGTERM)
    assert run.wait(timeout=300) == 128 + signal.SIGTERM, (tmp_path / "log").read_text()[-3000:]
    assert not psutil.wait_procs(loaders, timeout=10)[1]
    last = metric_rows(tmp_path)[-1]["step"]
    assert published_steps(out) == [last] and f"step {last} is finished and saved" in (tmp_path / "log").read_text()
    verify_manifest(out / f"global_step_{last}")


@pytest.fixture(scope="module")
def stopped(tiny_llama, tmp_path_factory):
    """Two ranks under torchrun, every output on and secrets around them; looked at, then SIGTERM to the launcher."""
    directory = write_pairs(tmp_path_factory.mktemp("stopped"))
    settings = ("trainer.logger=[console,file,tensorboard]", "trainer.report=true", "trainer.save_freq=1",
                "trainer.test_freq=1", f"+trainer.wandb_proxy=http://user:{CANARY}@127.0.0.1:1")  # fmt: skip
    places = {"TENSORBOARD_DIR": str(directory / "tensorboard"), "VERL_FILE_LOGGER_ROOT": str(directory)}
    run = started(directory, tiny_llama, *settings, ranks=2, **SECRETS, **places)
    try:
        metrics = directory / "out" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and len(metric_rows(directory)) > 1, run, directory / "log")
        job = family(run.pid)
        sockets = listening(job)
        run.send_signal(signal.SIGTERM)
        run.wait(timeout=300)
        psutil.wait_procs(job, timeout=60)
    finally:
        run.kill()
    return SimpleNamespace(directory=directory, sockets=sockets, launcher=run.pid, job=job)


@pytest.mark.process
@pytest.mark.slow
def test_two_ranks_whose_launcher_is_stopped_finish_their_step_and_save(stopped):
    log, out = (stopped.directory / "log").read_text(), stopped.directory / "out"
    last = metric_rows(stopped.directory)[-1]["step"]
    assert published_steps(out)[-1] == last and f"step {last} is finished and saved" in log, log[-3000:]
    verify_manifest(out / f"global_step_{last}")
    assert len(stopped.job) >= 3 and not any(process.is_running() for process in stopped.job)


@pytest.mark.process
@pytest.mark.slow
def test_no_secret_of_the_environment_or_the_config_is_in_any_file_of_a_run(stopped):
    names = {f.name for f in stopped.directory.rglob("*") if f.is_file()}
    assert {"log", "run_config.yaml", "report.html", "metrics.jsonl"} <= names and any("tfevents" in n for n in names)
    assert files_with_secrets(stopped.directory) == []


@pytest.mark.process
@pytest.mark.slow
def test_only_the_ranks_meeting_points_listen_beyond_this_machine(stopped):
    """torchrun's store, and gloo's, by which ranks of several nodes would meet."""
    wide = Counter(pid for _, pid, address, _ in stopped.sockets if address not in ("127.0.0.1", "::1"))
    assert wide[stopped.launcher] >= 1 and all(count <= 2 for count in wide.values()), stopped.sockets


@pytest.mark.process
@pytest.mark.slow
def test_a_torchrun_job_killed_and_started_again_equals_an_uninterrupted_one(tmp_path, tiny_llama):
    """SIGKILL of launcher and rank after a checkpoint, then the same command: metrics and weights bit for bit."""
    settings = ("trainer.total_training_steps=40", "trainer.save_freq=3")
    run = started(write_pairs(tmp_path), tiny_llama, *settings, ranks=1)
    wait_until(lambda: bool(published_steps(tmp_path / "out")), run, tmp_path / "log")
    job = family(run.pid)
    for process in job:
        process.kill()
    run.wait()
    assert psutil.wait_procs(job[1:], timeout=10)[1] == []
    killed_at = metric_rows(tmp_path)[-1]["step"]
    run = started(tmp_path, tiny_llama, *settings, ranks=1)
    assert run.wait(timeout=300) == 0, (tmp_path / "log").read_text()[-3000:]
    more = {"trainer__total_epochs": 2000, "trainer__total_training_steps": 40, "trainer__save_freq": 3}
    alone = make_trainer(write_pairs(tmp_path / "alone"), tiny_llama, **more)
    alone.fit()
    assert killed_at < 40 and metric_rows(tmp_path) == metric_rows(tmp_path / "alone")
    again = make_trainer(tmp_path, tiny_llama, **more)
    again.load_checkpoint()
    weights = weights_of(alone.engine)
    assert all((weights[name] == after).all() for name, after in weights_of(again.engine).items())


@pytest.mark.process
@pytest.mark.slow
def test_ranks_end_when_their_launcher_is_killed(tmp_path):
    """The rank's own call, without a model: the launcher is a Python process that starts it in a session of its own."""
    rank = (
        "import time; from verl.utils.supervisor import end_with_parent; end_with_parent(); "
        "print(1, flush=True); time.sleep(60)"
    )
    launcher = (
        "import subprocess, sys; "
        "subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True).wait()"
    )
    run = subprocess.Popen([sys.executable, "-c", launcher, rank], stdout=subprocess.PIPE, cwd=ROOT)
    assert run.stdout.readline() == b"1\n"
    (started_rank,) = psutil.Process(run.pid).children()
    run.kill()
    run.wait()
    assert psutil.wait_procs([started_rank], timeout=10)[1] == []
