"""GRPO of a small language model on word problems: vLLM in the ranks' own processes, FSDP, a rule reward.

    python -m examples.grpo_arithmetic.demo [--steps N] [--control-steps N] [--seed 0] [--out DIR]

Trains a start by SFT that mostly guesses, improves it by GRPO, which learns to show its work, then runs the same
command with learning rate 0 as a control. Ends with the accuracies on validation questions, the acceptance criteria
(acceptance.py), OUT/result.json and OUT/curves.png.

The control is short: its weights never change and validation is greedy, so that any number of steps gives the accuracy
of the start. It shows that the gain comes from the updates, not from the rollout, the weight sync or the validation.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from examples.demo_runner import (
    ROOT,
    PhaseFailed,
    Phases,
    TrainingWatch,
    by_step,
    console,
    make_progress,
    run_logged,
    run_shown,
)
from examples.grpo_arithmetic.acceptance import criteria_of, lines
from examples.grpo_arithmetic.make_start import DATA_SOURCE, SFT_STEPS
from verl.utils.fs import output_folder

BUDGET_S = {"set-up": 400.0, "start": 190.0, "GRPO": 400.0, "control": 100.0}
STEPS, CONTROL_STEPS = 60, 8
VALIDATIONS = 4
ACCURACY = f"val-core/{DATA_SOURCE}/acc/mean@1"
HERE = "examples/grpo_arithmetic"


def training_command(start: Path, run: Path, steps: int, seed: int, *more: str) -> list[str]:
    """GRPO as a user would type it."""
    settings = {
        "algorithm.adv_estimator": "grpo", "data.train_files": start / "train.parquet",
        "data.val_files": start / "val.parquet", "data.train_batch_size": 32, "data.max_prompt_length": 96,
        "data.max_response_length": 96, "data.seed": seed, "data.dataloader_num_workers": 0,
        "custom_reward_function.path": f"{HERE}/reward.py",
        "actor_rollout_ref.model.path": start / "model", "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": 8, "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.max_num_seqs": 256,
        "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
        "actor_rollout_ref.actor.share_prompt_forward": "true", "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.actor.optim.lr": "2e-4", "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 64,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 64,
        "trainer.device": "cpu", "trainer.n_gpus_per_node": 1, "trainer.total_epochs": 1000,
        "trainer.total_training_steps": steps, "trainer.test_freq": max(1, steps // VALIDATIONS),
        "trainer.save_freq": steps, "trainer.default_local_dir": run, "trainer.logger": "[tensorboard]",
        "trainer.project_name": "grpo_arithmetic", "trainer.experiment_name": run.name,
    }  # fmt: skip
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    return [*command, *(f"{key}={value}" for key, value in settings.items()), *more]


def draw_curves(run: Path, control: Path, file: Path) -> None:
    """Write a PNG: validation accuracy of both runs, mean reward and response length of the trained one, over steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    accuracy, reward, length = figure.subplots(1, 3)
    for name, folder, style in (("GRPO", run, "o-"), ("control, learning rate 0", control, "s--")):
        values = by_step(folder, ACCURACY)
        accuracy.plot(values.keys(), [100 * value for value in values.values()], style, label=name)
    accuracy.set(ylabel="validation accuracy, %", ylim=(0, 103))
    accuracy.legend()
    for axis, key, label in ((reward, "critic/score/mean", "mean reward of a step"),
                             (length, "response_length/mean", "response length, tokens")):  # fmt: skip
        values = by_step(run, key)
        axis.plot(values.keys(), values.values())
        axis.set(ylabel=label)
    for axis in (accuracy, reward, length):
        axis.set(xlabel="step")
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def train(command: list[str], run: Path, steps: int) -> None:
    """Train from scratch (an older run is removed) under a progress bar."""
    shutil.rmtree(run, ignore_errors=True)
    with make_progress() as progress:
        watch = TrainingWatch(progress, {"GRPO": (run, steps)}, describe)
        environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())}
        run_logged(command, run / "train.log", watch, environment)


def describe(data: Mapping[str, float]) -> str:
    """The part of a step's metrics that is shown next to the bar."""
    if "critic/score/mean" not in data:  # a validation
        return ""
    reward, length = data["critic/score/mean"], data["response_length/mean"]
    return f"reward {reward:+.3f}  answer {length:.0f} tokens  {data['timing_s/step']:.1f} s a step"


def result_table(trained: dict[int, float], control: dict[int, float]) -> Table:
    """Accuracies as a table."""
    table = Table("", "step", "validation accuracy %", title="GRPO on word problems")
    for name, accuracies in (("GRPO", trained), ("control, learning rate 0", control)):
        for step, accuracy in accuracies.items():
            table.add_row(name, str(step), f"{100 * accuracy:.1f}")
        table.add_section()
    return table


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--control-steps", type=int, default=CONTROL_STEPS)
    parser.add_argument("--sft-steps", type=int, default=SFT_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=output_folder, default=str(ROOT / "outputs" / "grpo_arithmetic"))
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    return args


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each phase."""
    start, out = args.out / "start", args.out
    make = [sys.executable, "-m", "examples.grpo_arithmetic.make_start", "--out", str(start)]
    zero = ("actor_rollout_ref.actor.optim.lr=0", "trainer.save_freq=0")
    return {
        "start": [*make, "--seed", str(args.seed), "--sft-steps", str(args.sft_steps)],
        "GRPO": training_command(start, out / "run", args.steps, args.seed),
        "control": training_command(start, out / "control", args.control_steps, args.seed, *zero),
    }


def main(argv: list[str] | None = None) -> int:
    """Run the phases; returns the exit code, 0 even if a criterion is missed."""
    args, begun = parse(argv), time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the running phase ends too
    out, run, control = args.out, args.out / "run", args.out / "control"
    phases, command = Phases(BUDGET_S), commands(args)
    console.rule("GRPO with a vLLM hybrid engine")
    try:
        phases.run("start", lambda: run_shown(command["start"]))
        phases.run("GRPO", lambda: train(command["GRPO"], run, args.steps))
        phases.run("control", lambda: train(command["control"], control, args.control_steps))
    except PhaseFailed as failure:
        console.print(str(failure), style="red", markup=False)  # a log may contain brackets
        return 1
    trained, same = by_step(run, ACCURACY), by_step(control, ACCURACY)
    criteria = criteria_of(trained, same, time.monotonic() - begun)
    result = {"seed": args.seed, "grpo": trained, "control": same,
             "criteria": {name: asdict(criterion) for name, criterion in criteria.items()}}  # fmt: skip
    (out / "result.json").write_text(json.dumps(result, indent=1))
    draw_curves(run, control, out / "curves.png")
    console.print(result_table(trained, same))
    console.print(phases.table())
    console.print("Acceptance criteria", *lines(criteria), sep="\n  ", highlight=False, soft_wrap=True)
    console.print(f"report {run / 'report.html'}\ncurves {out / 'curves.png'}\nall in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
