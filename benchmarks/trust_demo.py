"""GRPO of the demo with top_p=0.9, with and without the sampling mask, on three seeds: ratio, clip share, accuracy.

The rollout's log-probs are the old ones of the loss, so that a biased ratio is in it. Draws
docs/assets/trust_top_p.png. Runs that were measured before are not trained again.
"""

import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import Row, remembered, row, say
from benchmarks.seeds import SEEDS
from examples.demo_runner import ROOT, by_step, run_logged
from examples.grpo_arithmetic.demo import ACCURACY, training_command

STEPS = 30
OUT = ROOT / "outputs" / "benchmarks" / "trust_demo"
PICTURE = ROOT / "docs" / "assets" / "trust_top_p.png"
KINDS = {"mask": "true", "biased": "false"}
TITLES = {"mask": "with the sampling mask", "biased": "without it"}
KEYS = (
    "actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.top_k=100",
    "actor_rollout_ref.rollout.calculate_log_probs=true", "actor_rollout_ref.actor.use_rollout_log_probs=true",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16", "trainer.test_freq=15", "trainer.save_freq=-1",
    "trainer.report=false",
)  # fmt: skip


def trained(kind: str, seed: int) -> Path:
    """The folder of a run, which is trained unless it was before."""
    run = OUT / f"{kind}{seed}"
    seconds = remembered(run / "measured.json", lambda: train(kind, seed, run))
    say(f"seed {seed}, {kind}: {seconds:.0f} s")
    return run


def train(kind: str, seed: int, run: Path) -> float:
    """Train one kind for STEPS steps from the seed's start; returns the seconds."""
    start = OUT / f"start{seed}"
    begun = [sys.executable, "-m", "examples.grpo_arithmetic.make_start", "--out", str(start), "--seed", str(seed)]
    subprocess.run(begun, cwd=ROOT, check=True)  # a start that exists is reused
    shutil.rmtree(run, ignore_errors=True)
    mask = f"actor_rollout_ref.rollout.record_sampling_mask={KINDS[kind]}"
    since = time.monotonic()
    run_logged(training_command(start, run, STEPS, seed, *KEYS, mask), run / "train.log", env=dict(os.environ))
    return time.monotonic() - since


def curves(run: Path) -> dict[str, dict[int, float]]:
    """By step: geometric mean of pi / pi_rollout over the tokens of the updates, share of clipped tokens, accuracy."""
    ratio = {step: math.exp(-kl) for step, kl in by_step(run, "actor/ppo_kl").items()}
    columns = {"ratio": ratio, "clip_share": by_step(run, "actor/pg_clipfrac"), "accuracy": by_step(run, ACCURACY)}
    return {name: {step: x for step, x in column.items() if step <= STEPS} for name, column in columns.items()}


def draw(made: dict[str, list[dict[str, dict[int, float]]]], file: Path) -> None:
    """Write a PNG: a panel for each curve, a line for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    labels = {"ratio": "ratio in the update, geometric mean", "clip_share": "share of clipped tokens, %",
              "accuracy": "validation accuracy, %"}  # fmt: skip
    for axis, (name, label) in zip(figure.subplots(1, 3), labels.items(), strict=True):
        scale = 1 if name == "ratio" else 100
        for kind, color in (("mask", "C0"), ("biased", "C3")):
            for seed, run in enumerate(made[kind]):
                values = [scale * value for value in run[name].values()]
                title = TITLES[kind] if seed == 0 else None
                marker = "o" if name == "accuracy" else None
                axis.plot(list(run[name]), values, color=color, alpha=0.7, marker=marker, label=title)
        axis.set(xlabel="step", ylabel=label)
        axis.grid(alpha=0.3)
        axis.ticklabel_format(axis="y", useOffset=False)
    figure.axes[0].legend()
    figure.savefig(file, dpi=110)


def run() -> list[Row]:
    """A value per seed: means over the steps, and the last accuracy."""
    made: dict[str, list[dict[str, dict[int, float]]]] = {kind: [] for kind in KINDS}
    for seed in SEEDS:
        for kind in KINDS:
            made[kind].append(curves(trained(kind, seed)))
    draw(made, PICTURE)
    rows = []
    for kind, runs in made.items():
        units = {"ratio": "geometric mean of pi / pi_rollout in the updates", "clip_share": "% of tokens"}
        for name, unit in units.items():
            scale = 1 if name == "ratio" else 100
            values = [scale * sum(one[name].values()) / len(one[name]) for one in runs]
            rows.append(row(f"top_p_{name}_{kind}", values, f"{unit}, mean of {STEPS} steps"))
        rows.append(row(f"top_p_accuracy_{kind}", [100 * one["accuracy"][STEPS] for one in runs], "% right at the end"))
    return rows
