"""`make demo-dllm` on three seeds: what each run has to show, and its time."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from benchmarks.harness import Row, row, say
from examples.dllm_arithmetic.demands import LEAST, demand_table
from examples.running import ROOT, console

SEEDS = (0, 1, 2)


def run() -> list[Row]:
    """A row a demand, a value a seed; of the shares of equal answers the least counts, no seed may lose a token."""
    shown: dict[str, list[float]] = {name: [] for name in LEAST}
    seconds = []
    for seed in SEEDS:
        out = ROOT / "outputs" / "benchmarks" / f"dllm{seed}"
        begun = time.monotonic()
        command = [sys.executable, "-m", "examples.dllm_arithmetic.demo", "--seed", str(seed), "--out", str(out)]
        subprocess.run(command, cwd=ROOT, check=True)
        seconds.append(time.monotonic() - begun)
        values = json.loads((out / "evaluation.json").read_text())["demands"]
        for name, value in values.items():
            shown[name].append(value)
        say(f"seed {seed}, {seconds[-1]:.0f} s")
        console.print(demand_table(values))
    rows = [row(f"dllm_demo_{name}", values, LEAST[name][1]) for name, values in shown.items()]
    for found in rows:
        if found.name.endswith("_same_as_greedy"):
            found.value, found.unit = found.low, f"{found.unit}, least of the seeds"
    return [*rows, row("dllm_demo_seconds", seconds, "s")]
