"""`make demo-dllm` on three seeds: what each run has to show, and its time."""

import json

from benchmarks.harness import Row, row, say
from benchmarks.seeds import demo_runs
from examples.demo_runner import console
from examples.dllm_arithmetic.acceptance import MINIMUM, criteria_table


def run() -> list[Row]:
    """A row a demand, a value a seed; of the shares of equal answers the least counts, no seed may lose a token."""
    shown: dict[str, list[float]] = {name: [] for name in MINIMUM}
    seconds = []
    for seed, out, took in demo_runs("examples.dllm_arithmetic.demo", "dllm"):
        seconds.append(took)
        values = json.loads((out / "evaluation.json").read_text())["criteria"]
        for name, value in values.items():
            shown[name].append(value)
        say(f"seed {seed}, {seconds[-1]:.0f} s")
        console.print(criteria_table(values))
    rows = [row(f"dllm_demo_{name}", values, MINIMUM[name][1]) for name, values in shown.items()]
    for result in rows:
        if result.name.endswith("_same_as_greedy"):
            result.value, result.unit = result.low, f"{result.unit}, least of the seeds"
    return [*rows, row("dllm_demo_seconds", seconds, "s")]
