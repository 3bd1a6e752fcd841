"""GRPO with a tool: a small language model learns to call a calculator for products that it cannot compute itself.

    python -m examples.tools_arithmetic.demo [--steps N] [--seed 0] [--out DIR]

Trains a start by SFT that guesses and seldom calls, then runs GRPO twice from it, with as many samples: conversations
with the tool (rollout.mode=async, tool_agent), and single answers. Ends with both accuracies on held-out questions,
the acceptance criteria and OUT/result.json; OUT/tools/report.html shows conversations.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

from examples.demo_runner import by_step, console, run_phases, run_shown, train
from examples.grpo_arithmetic import demo as grpo
from examples.grpo_arithmetic.acceptance import Criterion, report
from examples.tools_arithmetic.make_start import COUNTS, DATA_SOURCE, SFT_STEPS

BUDGET_S = {"set-up": 400.0, "start": 100.0, "tools": 400.0, "single turn": 300.0}
STEPS = 80
GAIN_POINTS, TIME_S = 20.0, 900.0
ACCURACY, CALLED = (f"val-{kind}/{DATA_SOURCE}/{name}/mean@1" for kind, name in (("core", "acc"), ("aux", "called")))
HERE = "examples/tools_arithmetic"
SETTINGS = {
    "data.max_prompt_length": 16, "data.max_response_length": 48, "custom_reward_function.path": f"{HERE}/reward.py",
    "actor_rollout_ref.rollout.mode": "async", "actor_rollout_ref.rollout.agent.num_workers": 1,
    "actor_rollout_ref.actor.share_prompt_forward": "false", "trainer.project_name": "tools_arithmetic",
}  # fmt: skip
#: What a run with tools adds.
TOOLS = {
    "actor_rollout_ref.rollout.multi_turn.enable": "true",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": f"{HERE}/tools.yaml",
    "actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent",
}


def training_command(start: Path, run: Path, steps: int, seed: int, tools: bool) -> list[str]:
    """The command of the GRPO demo with SETTINGS, and with a tool or without."""
    settings = SETTINGS | (TOOLS if tools else {})
    return grpo.training_command(start, run, steps, seed, *(f"{key}={value}" for key, value in settings.items()))


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
    return grpo.parser_of(__doc__, STEPS, SFT_STEPS, "tools_arithmetic").parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the phases; returns the exit code, 0 even if a criterion is missed."""
    args, begun = parse(argv), time.monotonic()
    runs = {"tools": args.out / "tools", "single turn": args.out / "single_turn"}
    works = {"start": partial(run_shown, grpo.start_command("examples.tools_arithmetic.make_start", args))}
    for name, run in runs.items():
        command = training_command(args.out / "start", run, args.steps, args.seed, tools=name == "tools")
        works[name] = partial(train, "GRPO", command, run, args.steps, grpo.describe)
    phases = run_phases("GRPO with a calculator", BUDGET_S, works)
    if phases is None:
        return 1
    tools, single = (by_step(run, ACCURACY) for run in runs.values())
    result = {"seed": args.seed, "tools": tools, "single_turn": single, "called": by_step(runs["tools"], CALLED),
              "tools_gain_points": 100 * (list(tools.values())[-1] - list(single.values())[-1])}  # fmt: skip
    shares = {"with the calculator": tools, "single answers": single}
    report(args.out, result, criteria_of(tools, single, time.monotonic() - begun), "Products of two numbers",
           {"validation accuracy %": shares})  # fmt: skip
    console.print(phases.table())
    console.print(f"report {runs['tools'] / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
