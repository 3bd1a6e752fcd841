"""scripts/gpu_check.py: its comparisons run on the CPU too; its commands are those of GPUs, and pass the dry run."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from rich.console import Console

import train_spd_scorer
from dllm_reasoning import train_iterative_refine
from scripts import gpu_check, gpu_runs
from scripts.audit.keys import OURS
from scripts.gpu_runs import ALL, DISTANCE, REFERENCE, RUNS, STEPS, Result, Run, judged
from scripts.loss_compare import TRAININGS
from tests.helpers.configs import compose_ppo
from tests.helpers.engines import leave_group
from tests.helpers.ranks import run_ranks
from verl.trainer import fsdp_sft_trainer
from verl.trainer.main_ppo import rl_checks
from verl.training.checkpoint.publish import STEP_FOLDER
from verl.utils.problems import WRONG

ROOT = gpu_check.ROOT
TINY = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=1024)  # fmt: skip


@pytest.mark.parametrize("check", gpu_check.CHECKS)
def test_comparisons_hold_on_the_cpu_in_bfloat16(check):
    results = list(check(torch.device("cpu")))
    leave_group()
    assert results and all(result.holds and 0 < result.value for result in results)


def test_a_broken_kernel_misses_its_bound(monkeypatch):
    sdpa = gpu_check.BACKENDS["sdpa"]
    off = {"sdpa": lambda q, *rest: sdpa(q if q.dtype == torch.float32 else q * 1.1, *rest)}
    monkeypatch.setattr(gpu_check, "BACKENDS", off)
    assert not all(result.holds for result in gpu_check.check_attention(torch.device("cpu")))
    assert not Result("loss", math.nan, "").holds


def measured(rank: int, ranks: int, folder: str) -> list[tuple[str, float, str]]:
    results = gpu_check.measure("tiny", TINY, torch.device("cpu"), Path(folder), length=32, steps=2)
    return [(result.name, result.value, result.unit) for result in results]


@pytest.mark.process
def test_steps_are_timed_on_all_ranks(tmp_path):
    for name, rate, unit in (results for (results,) in run_ranks(measured, 2, str(tmp_path / "model"))):
        assert name == "tiny on 2 ranks: throughput" and rate > 0 and unit == "tokens/s"


def test_the_demos_of_a_users_model_report_their_figures(monkeypatch, tmp_path):
    commands = {}
    criteria = {"gain": {"what": "gain", "value": "12 points", "met": True},
                "control": {"what": "control", "value": "3 points", "met": False}}  # fmt: skip
    results = {"demo": {"result.json": {"criteria": criteria}},
               "gsm8k.demo": {"result.json": {"criteria": {"gain": criteria["gain"]}}},
               "dllm.demo": {"result.json": {"means": {"served": 1.5, "gap": -0.5}}}}  # fmt: skip

    def run(command, folder, log, limit):
        name = command[2].removeprefix("examples.pretrained.")
        commands[name] = command[3:]
        out = Path(command[command.index("--out") + 1])
        out.mkdir()
        for file, content in results[name].items():
            (out / file).write_text(json.dumps(content))

    monkeypatch.setattr(gpu_runs, "run", run)
    shown = [(result.name, result.value, result.holds) for demo in gpu_runs.DEMOS
             for result in gpu_runs.run_demo(demo, Path("/models/m"), tmp_path)]  # fmt: skip
    assert shown == [
        ("GRPO of a pretrained model: gain: 12 points", 0.0, True),
        ("GRPO of a pretrained model: control: 3 points", 1.0, False), ("GRPO on GSM8K: gain: 12 points", 0.0, True),
        ("refinement of a pretrained model: served", 1.5, True), ("refinement of a pretrained model: gap", -0.5, True),
    ]  # fmt: skip
    assert [command[:2] for command in commands.values()] == 3 * [["--model", "/models/m"]]


def test_a_rank_holds_its_share_of_a_model():
    assert gpu_check.timings(1) == [("0.5B", 1), ("7B", 1)]
    assert gpu_check.timings(8) == [("0.5B", 1), ("0.5B", 8), ("7B", 8)]
    one, eight = (gpu_check.bytes_a_rank(gpu_check.SHAPES["7B"], ranks) / 2**30 for ranks in (1, 8))
    assert one == pytest.approx(8 * eight) and 110 < one < 140  # more than a GPU of 80 GiB has


def failing(work: Path, message: str):
    yield Result("first", 1.0, "unit")
    sys.exit(f"{message} in {work}")


def test_one_failure_loses_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"total_memory": 80 << 30}))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(gpu_check, "CHECKS", (lambda device: 1 / 0,))
    monkeypatch.setattr(gpu_check, "RUNS", {"broken": Run(), "four": Run(ranks=4), "sound": Run()})
    monkeypatch.setattr(gpu_check, "run_row", lambda name, work, gpus: (
        failing(work, "CUDA error") if name == "broken" else iter([Result(name, 0, "bad metrics", 0)])
    ))  # fmt: skip
    monkeypatch.setattr(gpu_check, "measure_together", lambda shape, ranks, work: iter([Result(shape, ranks, "x")]))
    gpu_check.CHECKS[0].__name__ = "kernels"
    assert gpu_check.main(["--json", str(tmp_path / "results.json")]) == 1
    results = {row["name"]: row for row in json.loads((tmp_path / "results.json").read_text())}
    assert list(results) == ["kernels", "first", "broken", "sound", "0.5B", "7B"]
    assert results["kernels"]["value"] is None and "division by zero" in results["kernels"]["message"]
    assert "SystemExit: CUDA error in" in results["broken"]["message"] and results["sound"]["value"] == 0
    said = capsys.readouterr().out
    assert "four: left out, it needs 4 GPUs" in said and "CUDA error" in said


@pytest.mark.process
def test_the_end_of_a_failed_command_is_reported(monkeypatch, tmp_path):
    recipe = gpu_runs.TRAININGS["sft"]
    words = [sys.executable, "-c", "print('out of memory'); raise SystemExit(3)"]
    monkeypatch.setitem(
        gpu_runs.TRAININGS, "sft", type(recipe)(recipe.inputs, lambda folder: [words], recipe.train)
    )
    (result,) = gpu_check.attempt("SFT", lambda: gpu_runs.run_row("SFT", tmp_path, 1))
    assert not result.holds and "exit code 3" in result.message and "out of memory" in result.message
    words[2] = "import time; print('waits', flush=True); time.sleep(60)"
    monkeypatch.setattr(gpu_runs, "LIMIT_S", 2)
    (result,) = gpu_check.attempt("SFT", lambda: gpu_runs.run_row("SFT", tmp_path, 1))
    assert "was stopped after 2 seconds" in result.message and "waits" in result.message
    assert not (tmp_path / recipe.inputs).exists()  # the next row makes them again


@pytest.mark.parametrize("gpus", range(1, 17))
def test_all_numbers_of_ranks_share_a_batch(gpus):
    mini = gpu_runs.prompts_a_mini_batch(gpus)
    assert mini >= 8 and all(mini % ranks == 0 for ranks in (1, 2, 4, gpus))


def test_commands_are_those_of_gpus(tmp_path):
    assert {row.training for row in RUNS.values()} == set(TRAININGS)
    for row in RUNS.values():
        for words in gpu_runs.commands_of(row, tmp_path, tmp_path, 6):
            assert "cpu" not in words and "trainer.device=cpu" not in words
            keys = [word.partition("=")[0] for word in words if "=" in word]
            assert len(keys) == len(set(keys))
    words = gpu_runs.command_of(RUNS["update on all GPUs in bfloat16"], tmp_path, tmp_path, 6)
    assert {"trainer.n_gpus_per_node=6", "data.train_batch_size=24", f"{gpu_runs.ENGINE}.dtype=bfloat16"} <= {*words}
    words = gpu_runs.command_of(RUNS["refinement, sequence parallel"], tmp_path, tmp_path, 6)
    assert {"trainer.n_gpus_per_node=2", "--nproc_per_node=2"} <= {*words}


def test_checkpoints_are_merged_and_resumed(tmp_path):
    early, whole = gpu_runs.commands_of(RUNS["update, saved in the background and resumed"], tmp_path, tmp_path, 1)
    changed = [pair for pair in zip(early, whole, strict=True) if pair[0] != pair[1]]
    assert changed == [(f"trainer.total_training_steps={STEPS - 1}", f"trainer.total_training_steps={STEPS}")]
    assert {"trainer.save_freq=1", f"{gpu_runs.ACTOR}.checkpoint.async_save=true"} <= {*early}
    train, merge, *tests = gpu_runs.commands_of(RUNS["update on all GPUs, merged"], tmp_path, tmp_path, 8)
    assert "trainer.save_freq=-1" in train  # at the end
    folder = Path(merge[merge.index("--local_dir") + 1])
    assert folder.name == "actor" and STEP_FOLDER.fullmatch(folder.parent.name) and merge[3] == "merge"
    compared = [words[words.index("--test_hf_dir") + 1] for words in tests]
    assert compared == [merge[merge.index("--target_dir") + 1], str(folder / "huggingface")]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, tiny_llama):
    """The folder of models and data of all trainings."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "start").mkdir()
    for link in (folder / "start" / "model", folder / "model"):
        link.symlink_to(tiny_llama)
    questions = [
        {"data_source": "words", "prompt": [{"role": "user", "content": "1 + 1"}],
         "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": i}} for i in range(40)
    ]  # fmt: skip
    for split in ("train", "val"):
        pd.DataFrame(questions).to_parquet(folder / "start" / f"{split}.parquet")
        pd.DataFrame([{"instruction": "1 + 1", "output": "2"}] * 20).to_parquet(folder / f"{split}.parquet")
    return folder


ENTRIES = {"verl.trainer.fsdp_sft_trainer": ("sft_trainer", fsdp_sft_trainer.main),
           "dllm_reasoning.train_iterative_refine": ("iterative_refine", train_iterative_refine.main)}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_command_passes_the_dry_run(name, inputs, tmp_path, capsys):
    row, gpus = RUNS[name], 12
    words = gpu_runs.command_of(row, inputs, tmp_path, gpus)
    if row.training == "spd":
        assert "trainer.device=cuda" in train_spd_scorer.parse_args(words[2:]).overrides
        return
    start = next(i for i, word in enumerate(words) if word.partition(".")[0] in ("verl", "dllm_reasoning"))
    settings = [*words[start + 1 :], "trainer.dry_run=true"]
    assert "trainer.device=cuda" in settings
    if row.training == "grpo":
        problems, _ = rl_checks().problems(compose_ppo(*settings), known=compose_ppo())
        assert not [problem.message for problem in problems if problem.kind == WRONG]
        return
    tree, main = ENTRIES[words[start]]
    with pytest.raises(SystemExit) as ended:
        main.__wrapped__(compose_ppo(*settings, config_dir=ROOT / OURS[tree].replace(".", "/"), config_name=tree))
    assert ended.value.code == 0, capsys.readouterr().out


def metrics(norm=0.5, loss=0.01, distance=1e-4, last=0.4, late=1e-4) -> dict:
    return {(1, "actor/grad_norm"): norm, (1, "actor/pg_loss"): loss, (1, DISTANCE): distance, (STEPS, DISTANCE): late,
            (STEPS, "actor/grad_norm"): last, (STEPS, "actor/pg_loss"): loss}  # fmt: skip


def missed(name: str, results: dict) -> list[str]:
    checked = judged(name, RUNS[name], results, metrics())
    return [result.name.partition(": ")[2] for result in checked if not result.holds]


def test_updates_are_compared_with_one_gpu_in_float32():
    exact, rough = "update, tensor parallel", "update on all GPUs in bfloat16"
    assert missed(exact, metrics(norm=0.504, loss=0.0108)) == []
    assert missed(exact, metrics(norm=0.506)) == ["gradient norm, step 1"]  # 1.2 %
    assert missed(rough, metrics(norm=0.52, loss=0.019, distance=0.019)) == []
    assert missed(rough, metrics(norm=1.0)) == ["gradient norm, step 1"]  # a sum over two ranks for a mean
    assert missed(rough, metrics(loss=-0.01, distance=0.03)) == ["rollout and actor, step 1", "loss, step 1"]
    assert missed(exact, {(1, "actor/grad_norm"): 0.5}) == ["rollout and actor, step 1", "loss, step 1"]  # not reported
    assert missed(exact, metrics(last=0.2, late=1.0)) == []
    assert missed("GRPO with LoRA", metrics(late=0.1)) == [f"rollout and actor, step {STEPS}"]  # weights of step 1
    assert missed("update, saved in the background and resumed", metrics(last=0.2)) == ["gradient norm, step 3"]


def test_sft_is_compared_with_the_cpu():
    there = {(1, "train/grad_norm"): 2.0, (1, "train/loss"): 1.5}
    for loss, holds in ((1.5005, True), (2.5, False)):  # all tokens in place of the learned ones, say
        results = judged("SFT, packed", RUNS["SFT, packed"], {**there, (1, "train/loss"): loss}, there)
        assert [result.holds for result in results] == [True, True, holds]


def test_other_trainings_need_finite_metrics_only():
    assert [result.holds for result in judged("SFT", RUNS["SFT"], {(1, "loss"): math.nan}, None)] == [False]
    assert [result.holds for result in judged("SFT", RUNS["SFT"], {(1, "loss"): 2.0}, None)] == [True]
    assert [result.holds for result in judged("SFT", RUNS["SFT"], {}, None)] == [False]
    assert RUNS[REFERENCE].replays and RUNS["update on all GPUs, merged"].ranks == ALL


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run everything")
def test_without_a_gpu_it_says_what_it_would_do(capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "has_gpus", lambda: False)
    assert gpu_check.main([]) == 0
    said = capsys.readouterr().out
    assert "No GPU is here" in said and "GRPO with LoRA" in said and "7B" in said


def command(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run everything")
def test_a_gpu_without_pytorch_for_it_is_an_error(capsys, monkeypatch, tmp_path):
    command(tmp_path, "nvidia-smi", "echo 'GPU 0: NVIDIA H100 (UUID: GPU-0)'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpu_check.main([]) == 1
    assert "cannot use them" in capsys.readouterr().out


def run_installer(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Set up an environment for CUDA there."""
    environment = {"PATH": "/usr/bin:/bin", "VERL_DEVICE": "cuda", **variables}
    return subprocess.run(["bash", "scripts/setup_env.sh"], cwd=folder, env=environment, capture_output=True, text=True)


def copy_installer(folder: Path) -> None:
    requirements = (f"requirements/{kind}.txt" for kind in ("base", "cuda", "test", "reasoning_gym"))
    for name in ("scripts/setup_env.sh", "setup.py", *requirements):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / ".venv/bin").mkdir(parents=True)


@pytest.mark.process
@pytest.mark.parametrize(("before", "stays"), [("cpu 0", False), ("cuda 0", True)])
def test_the_environment_is_made_again_for_another_kind_of_device(tmp_path, before, stays):
    copy_installer(tmp_path)
    (tmp_path / ".venv/.ready").write_text(before)
    command(tmp_path / ".venv/bin", "python", "exit 4")  # pip would run now
    python = command(tmp_path, "python", 'test "$1" = -c || { echo "$@"; exit 3; }')
    ended = run_installer(tmp_path, PYTHON=str(python))
    assert (tmp_path / ".venv").exists() == stays
    assert (ended.returncode, "-m venv .venv" in ended.stdout) == ((4, False) if stays else (3, True)), ended.stdout


@pytest.mark.process
@pytest.mark.parametrize("fails_at", ["nothing", "test.txt"])
def test_what_pip_says_goes_to_a_log_and_only_a_failure_to_the_screen(tmp_path, fails_at):
    copy_installer(tmp_path)
    said = f'for i in 1 2 3; do echo "WARNING: $i of $*" >&2; done\ncase "$*" in *{fails_at}*) exit 5;; esac'
    command(tmp_path / ".venv/bin", "python", f"[ $1 = -c ] && exit\n{said}")
    ended = run_installer(tmp_path)
    lines, log = ended.stdout.splitlines(), (tmp_path / ".venv/setup.log").read_text()
    assert "WARNING: 3 of -m pip --disable-pip-version-check install -r requirements/cuda.txt" in log
    if fails_at == "nothing":
        assert (ended.returncode, ended.stderr, len(log.splitlines())) == (0, "", 12)  # four calls of pip
        assert lines[-1].startswith("[setup] ready after ") and lines[-1].endswith("what pip said: .venv/setup.log")
    else:
        assert ended.returncode == 5 and lines[-1] == "[setup] pip failed; the last lines of .venv/setup.log:"
        assert ended.stderr.splitlines()[-1].endswith("install --no-deps -r requirements/test.txt")
        assert not (tmp_path / ".venv/.ready").exists()


def test_results_are_printed_with_their_bounds(capsys):
    results = [Result("a", 2.0, "", 1.0), Result("b", 0.5, "", 1.0), Result("c", math.nan, "", message="[error] x")]
    gpu_check.print_results(results, Console(width=100), "a card")
    said = capsys.readouterr().out
    assert "at most 1: MISSED" in said and "at most 1: met" in said and "c failed: [error] x" in said
