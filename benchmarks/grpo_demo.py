"""`make demo-grpo` on three seeds: validation accuracy of start, GRPO and control, and the time of each."""

import json

from benchmarks.harness import Row, ratios, row, say
from benchmarks.seeds import demo_runs
from examples.grpo_arithmetic.acceptance import has_learned


def run() -> list[Row]:
    """Accuracies in per cent of the validation questions, a value a seed; of what each seed has to show, the least."""
    starts, ends, controls, seconds = [], [], [], []
    for seed, out, took in demo_runs("examples.grpo_arithmetic.demo", "grpo"):
        seconds.append(took)
        result = json.loads((out / "result.json").read_text())
        trained, control = (list(result[name].values()) for name in ("grpo", "control"))
        starts.append(100 * trained[0])
        ends.append(100 * trained[-1])
        controls.append(100 * control[-1])
        say(f"seed {seed}: {starts[-1]:.1f} % -> {ends[-1]:.1f} %, control {controls[-1]:.1f} %")
    learned = [float(has_learned(start / 100, end / 100)) for start, end in zip(starts, ends, strict=True)]
    above = [end - control for end, control in zip(ends, controls, strict=True)]
    return [
        least("grpo_demo_learned", learned, "1: every seed gains 1.5 times its start's accuracy or ends above 90 %"),
        least("grpo_demo_over_control", above, "points above the control, least of the seeds"),
        row("grpo_demo_gain", ratios(ends, starts), "times the start's accuracy"),
        row("grpo_demo_start", starts, "% right"),
        row("grpo_demo_end", ends, "% right"),
        row("grpo_demo_control", controls, "% right"),
        row("grpo_demo_seconds", seconds, "s"),
    ]


def least(name: str, values: list[float], unit: str) -> Row:
    """A row that holds of every seed."""
    return Row(name, min(values), unit, min(values), max(values), len(values))
