"""A demo repeated on several seeds, by the command that a user types; a seed measured before is not run again."""

import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.harness import remembered
from examples.demo_runner import ROOT

SEEDS = (0, 1, 2)


def demo_runs(module: str, name: str) -> Iterator[tuple[int, Path, float]]:
    """Run `python -m MODULE` on each seed: gives the seed, the folder of its results and the seconds it took.

    A seed that was measured before is not run again.
    """
    for seed in SEEDS:
        out = ROOT / "outputs" / "benchmarks" / f"{name}{seed}"
        command = [sys.executable, "-m", module, "--seed", str(seed), "--out", str(out)]
        yield seed, out, remembered(out / "measured.json", partial(seconds_of, command))


def seconds_of(command: list[str]) -> float:
    """Run a command in the project's folder; CalledProcessError where it fails."""
    begun = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True)
    return time.monotonic() - begun
