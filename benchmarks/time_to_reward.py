"""Seconds until GRPO on word problems answers more than 80 % of the held-out questions, ours against TRL's.

Both start at the same moment, each with one thread on a core of its own; the cores are exchanged between seeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

from benchmarks.harness import Row, ratios, remembered, row, say
from benchmarks.rl_whole_step import start
from benchmarks.seeds import SEEDS
from examples.demo_runner import ROOT, by_step
from examples.grpo_arithmetic.demo import ACCURACY, training_command

STEPS, EVERY, ENOUGH = 75, 5, 0.80
PROMPTS, SAMPLES, LIMIT, LR = 32, 8, 96, 2e-4  # those of the demo
REWARD = """from examples.grpo_arithmetic import reward


def compute_score(*args):
    return reward.compute_score(*args)["score"]
"""


def make(folder: Path, seed: int) -> None:
    """The demo's start, also where benchmarks.trl_steps looks for it; a start that exists is reused."""
    begun = [sys.executable, "-m", "examples.grpo_arithmetic.make_start", "--out", str(folder), "--seed", str(seed)]
    subprocess.run(begun, cwd=ROOT, check=True)
    (folder / "prompts.parquet").write_bytes((folder / "train.parquet").read_bytes())
    (folder / "reward.py").write_text(REWARD)


def seconds_to(seconds: list[float], accuracy: Mapping[int, float]) -> float:
    """Seconds of the steps before the first validation from which on all are above ENOUGH.

    RuntimeError if the last one is not. Validations have the number of the step that they follow, 0 is the start.
    """
    reached = None
    for step, value in sorted(accuracy.items()):
        reached = (step if reached is None else reached) if value > ENOUGH else None
    if reached is None:
        raise RuntimeError(f"{100 * ENOUGH:g} % are not reached in {len(seconds)} steps: {accuracy}")
    return [0.0, *accumulate(seconds)][reached]


def ours(folder: Path, seed: int, core: int) -> tuple[list[float], dict[int, float]]:
    """Seconds of each step, validation not counted, and validation accuracies by step."""
    run = folder / "ours"
    start(training_command(folder, run, STEPS, seed, f"trainer.test_freq={EVERY}", "trainer.save_freq=-1",
                           "trainer.report=false"), core)  # fmt: skip
    return list(by_step(run, "timing_s/step").values()), by_step(run, ACCURACY)


def trl(folder: Path, seed: int, core: int) -> tuple[list[float], dict[int, float]]:
    """The same of TRL's GRPOTrainer."""
    out = folder / "trl.json"
    options = {"out": out, "steps": STEPS, "prompts": PROMPTS, "samples": SAMPLES, "limit": LIMIT, "lr": LR,
               "seed": seed, "validate-every": EVERY}  # fmt: skip
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    start([sys.executable, "-m", "benchmarks.trl_steps", str(folder), *given], core)
    result = json.loads(out.read_text())
    return result["seconds"], {int(step): value for step, value in result["accuracy"].items()}


def measured(
    train: Callable[[Path, int, int], tuple[list[float], dict[int, float]]], folder: Path, seed: int, core: int
) -> tuple[list[float], dict[int, float]]:
    """What a training gives, now or in an earlier run."""
    file = folder / f"{train.__name__}_measured.json"
    seconds, accuracy = remembered(file, lambda: train(folder, seed, core))
    return seconds, {int(step): value for step, value in accuracy.items()}


def run() -> list[Row]:
    """A value per seed; runs that were measured before are taken from the seed's folder, which is logged."""
    taken: dict[str, list[float]] = {"trl": [], "ours": []}
    per_step: dict[str, list[float]] = {"trl": [], "ours": []}
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("time_to_reward needs two cores: both trainings run at the same time, each on its own")
    for seed in SEEDS:
        folder = ROOT / "outputs" / "benchmarks" / f"time_to_reward{seed}"
        make(folder, seed)
        with ThreadPoolExecutor() as pool:
            ends = [pool.submit(measured, train, folder, seed, cores[(place + seed) % 2])
                    for place, train in enumerate((trl, ours))]  # fmt: skip
        for name, end in zip(taken, ends, strict=True):
            seconds, accuracy = end.result()
            taken[name].append(seconds_to(seconds, accuracy))
            per_step[name].append(sum(seconds) / len(seconds))
            say(f"seed {seed}, {name}: {taken[name][-1]:.0f} s, {per_step[name][-1]:.1f} s a step")
    return [
        row("time_to_reward_vs_trl", ratios(taken["trl"], taken["ours"]), "times, TRL / ours"),
        *(row(f"time_to_reward_{name}", seconds, "s") for name, seconds in taken.items()),
        *(row(f"time_to_reward_step_{name}", seconds, "s a step, mean") for name, seconds in per_step.items()),
    ]
