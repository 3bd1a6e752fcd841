"""The GRPO demo trained asynchronously and in turn on equally many samples: accuracy on 1,000 held-out questions."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.async_speed import ASYNC, SYNC, launch
from benchmarks.harness import Row, remembered, row, say
from benchmarks.seeds import SEEDS
from examples.demo_runner import ROOT, by_step
from examples.grpo_arithmetic.demo import ACCURACY, STEPS, training_command
from examples.grpo_arithmetic.make_start import SFT_STEPS, write_questions

QUESTIONS, PROMPTS, SAMPLES = 1000, 32, 8  # the last two are those of the demo
LATEST = 1 << 20  # validate after the last step only
#: One trainer rank and one server; a sync after every update, and a batch ahead.
POOLS = {
    "data.train_batch_size": 0, "rollout.nnodes": 1, "rollout.n_gpus_per_node": 1, "rollout.n": SAMPLES,
    "rollout.total_epochs": 1000, "rollout.test_freq": LATEST, "async_training.staleness_threshold": 1,
    "async_training.trigger_parameter_sync_step": 1, "actor_rollout_ref.rollout.mode": "async",
    "actor_rollout_ref.rollout.calculate_log_probs": "true",
}  # fmt: skip


def make(folder: Path, seed: int) -> Path:
    """The demo's start with QUESTIONS questions for validation."""
    command = [sys.executable, "-m", "examples.grpo_arithmetic.make_start", "--out", str(folder / "start"), "--seed",
               str(seed), "--sft-steps", str(SFT_STEPS)]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True)
    (folder / "questions").mkdir(exist_ok=True)
    write_questions(folder / "questions", seed, {"train": STEPS * PROMPTS, "val": QUESTIONS, "test": 0})
    return folder / "start"


def accuracy(folder: Path, seed: int, kind: str) -> float:
    """Per cent of the held-out questions after STEPS updates of PROMPTS prompts."""
    start, run = make(folder, seed), folder / kind
    questions = folder / "questions"
    changes = {"data.train_files": questions / "train.parquet", "data.val_files": questions / "val.parquet",
               "trainer.test_freq": LATEST, "trainer.val_before_train": "false", "trainer.save_freq": 0,
               "trainer.report": "false", "trainer.logger": "[]"}  # fmt: skip
    words = training_command(start, run, STEPS, seed)[3:]
    settings = dict(word.split("=", 1) for word in words) | changes
    if kind == "async":
        settings |= POOLS | {"rollout.total_rollout_steps": STEPS * PROMPTS}
    seconds = launch(ASYNC if kind == "async" else SYNC, settings, 1 if kind == "async" else os.cpu_count(), run)
    right = 100 * by_step(run, ACCURACY)[STEPS]
    say(f"seed {seed}, {kind}: {right:.1f} % after {seconds:.0f} s")
    return right


def run() -> list[Row]:
    """A value for each seed; those that were measured before are taken from their files."""
    accuracies: dict[str, list[float]] = {"sync": [], "async": []}
    for seed in SEEDS:
        folder = ROOT / "outputs" / "benchmarks" / f"async_accuracy{seed}"
        for kind, values in accuracies.items():
            file = folder / f"{kind}.json"
            values.append(remembered(file, lambda folder=folder, seed=seed, kind=kind: accuracy(folder, seed, kind)))
    losses = [sync - asynchronous for sync, asynchronous in zip(*accuracies.values(), strict=True)]
    what = f"points of accuracy, synchronous less asynchronous, {STEPS * PROMPTS * SAMPLES} samples"
    return [
        row("async_accuracy_loss", losses, what),
        *(row(f"{kind}_accuracy", values, f"% of {QUESTIONS} questions") for kind, values in accuracies.items()),
    ]
