"""A demo repeated on several seeds, by the command that a user types."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from examples.running import ROOT

SEEDS = (0, 1, 2)


def demo_runs(module: str, name: str) -> Iterator[tuple[int, Path, float]]:
    """Run `python -m MODULE` on each seed: gives the seed, the folder of its results and the seconds it took."""
    for seed in SEEDS:
        out = ROOT / "outputs" / "benchmarks" / f"{name}{seed}"
        begun = time.monotonic()
        subprocess.run([sys.executable, "-m", module, "--seed", str(seed), "--out", str(out)], cwd=ROOT, check=True)
        yield seed, out, time.monotonic() - begun
