"""GRPO with a tool: a small language model learns to call a calculator for products that it cannot compute itself.

    python -m examples.tools_arithmetic.demo [--steps N] [--seed 0] [--out DIR]

Trains a start by SFT that guesses and seldom calls, then runs GRPO twice from it, with as many samples: conversations
with the tool (rollout.mode=async, tool_agent), and single answers. Ends with both accuracies on held-out questions,
the acceptance criteria, OUT/result.json and OUT/curves.png; OUT/tools/report.html shows conversations.
"""

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from examples.demo_runner import ROOT, PhaseFailed, Phases, by_step, console, run_shown
from examples.grpo_arithmetic.acceptance import Criterion, lines
from examples.grpo_arithmetic.demo import train
from examples.tools_arithmetic.make_start import COUNTS, DATA_SOURCE, SFT_STEPS
from verl.utils.fs import output_folder

BUDGET_S = {"set-up": 400.0, "start": 100.0, "tools": 400.0, "single turn": 300.0}
STEPS, VALIDATIONS = 80, 4
GAIN_POINTS, TIME_S = 20.0, 900.0
ACCURACY, CALLED = (f"val-{kind}/{DATA_SOURCE}/{name}/mean@1" for kind, name in (("core", "acc"), ("aux", "called")))
HERE = "examples/tools_arithmetic"
#: What a run with tools adds.
TOOLS = {
    "actor_rollout_ref.rollout.multi_turn.enable": "true",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": f"{HERE}/tools.yaml",
    "actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent",
}


def training_command(start: Path, run: Path, steps: int, seed: int, tools: bool) -> list[str]:
    """GRPO as a user would type it."""
    settings = {
        "algorithm.adv_estimator": "grpo", "data.train_files": start / "train.parquet",
        "data.val_files": start / "val.parquet", "data.train_batch_size": 32, "data.max_prompt_length": 16,
        "data.max_response_length": 48, "data.seed": seed, "data.dataloader_num_workers": 0,
        "custom_reward_function.path": f"{HERE}/reward.py", "actor_rollout_ref.model.path": start / "model",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "false", "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.mode": "async", "actor_rollout_ref.rollout.agent.num_workers": 1,
        "actor_rollout_ref.rollout.n": 8, "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.max_num_seqs": 256, "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.actor.optim.lr": "2e-4", "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 64,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 64,
        "trainer.device": "cpu", "trainer.n_gpus_per_node": 1, "trainer.total_epochs": 1000,
        "trainer.total_training_steps": steps, "trainer.test_freq": max(1, steps // VALIDATIONS),
        "trainer.save_freq": steps, "trainer.default_local_dir": run, "trainer.logger": "[tensorboard]",
        "trainer.project_name": "tools_arithmetic", "trainer.experiment_name": run.name,
    } | (TOOLS if tools else {})  # fmt: skip
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in settings.items())]


def draw_curves(runs: dict[str, Path], file: Path) -> None:
    """Write a PNG: validation accuracy and mean reward of both runs, and the share of samples that call the tool."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    accuracy, reward, called = figure.subplots(1, 3)
    for name, run in runs.items():
        values = by_step(run, ACCURACY)
        accuracy.plot(values.keys(), [100 * value for value in values.values()], "o-", label=name)
        for axis, key, factor in ((reward, "critic/score/mean", 1), (called, "reward/called/mean", 100)):
            values = by_step(run, key)
            axis.plot(values.keys(), [factor * value for value in values.values()], label=name)
    accuracy.set(ylabel="validation accuracy, %", ylim=(0, 103))
    reward.set(ylabel="mean reward of a step")
    called.set(ylabel="samples that call the tool, %", ylim=(0, 103))
    for axis in (accuracy, reward, called):
        axis.set(xlabel="step")
        axis.grid(alpha=0.3)
    accuracy.legend()
    figure.savefig(file, dpi=110)


def criteria_of(tools: dict[int, float], single: dict[int, float], seconds: float) -> dict[str, Criterion]:
    """Criteria by name, from validation accuracies by step and the run's time in seconds."""
    end, other = (100 * list(values.values())[-1] for values in (tools, single))
    return {
        "gain": Criterion(
            f"accuracy on {COUNTS['val']} held-out questions, with the tool and by single answers",
            f"{end:.1f} % against {other:.1f} %", f"at least {GAIN_POINTS:g} points more", end - other >= GAIN_POINTS,
        ),
        "seconds": Criterion("time after the set-up", f"{seconds:.0f} s", f"under {TIME_S:.0f} s", seconds < TIME_S),
    }  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--sft-steps", type=int, default=SFT_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=output_folder, default=str(ROOT / "outputs" / "tools_arithmetic"))
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the phases; returns the exit code, 0 even if a criterion is missed."""
    args, begun = parse(argv), time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the running phase ends too
    out, start = args.out, args.out / "start"
    runs = {"tools": out / "tools", "single turn": out / "single_turn"}
    make = [sys.executable, "-m", "examples.tools_arithmetic.make_start", "--out", str(start)]
    phases = Phases(BUDGET_S)
    console.rule("GRPO with a calculator")
    try:
        make += ["--seed", str(args.seed), "--sft-steps", str(args.sft_steps)]
        phases.run("start", lambda: run_shown(make))
        for name, run in runs.items():
            command = training_command(start, run, args.steps, args.seed, tools=name == "tools")
            phases.run(name, lambda command=command, run=run: train(command, run, args.steps))
    except PhaseFailed as failure:
        console.print(str(failure), style="red", markup=False)  # a log may contain brackets
        return 1
    tools, single = (by_step(run, ACCURACY) for run in runs.values())
    criteria = criteria_of(tools, single, time.monotonic() - begun)
    result = {"seed": args.seed, "tools": tools, "single_turn": single, "called": by_step(runs["tools"], CALLED),
              "tools_gain_points": 100 * (list(tools.values())[-1] - list(single.values())[-1]),
              "criteria": {name: asdict(criterion) for name, criterion in criteria.items()}}  # fmt: skip
    (out / "result.json").write_text(json.dumps(result, indent=1))
    draw_curves(runs, out / "curves.png")
    table = Table("", "step", "validation accuracy %", title="Products of two numbers")
    for name, values in (("with the calculator", tools), ("single answers", single)):
        for step, accuracy in values.items():
            table.add_row(name, str(step), f"{100 * accuracy:.1f}")
        table.add_section()
    console.print(table)
    console.print(phases.table())
    console.print("Acceptance criteria", *lines(criteria), sep="\n  ", highlight=False, soft_wrap=True)
    console.print(f"report {runs['tools'] / 'report.html'}\ncurves {out / 'curves.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
