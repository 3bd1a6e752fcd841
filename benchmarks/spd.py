"""Benchmarks of the speculative-decoding scorer: a training step, judging during decoding."""

from benchmarks import spd_judging, spd_step
from benchmarks.harness import Row, run_modules


def run() -> list[Row]:
    """All rows, the step's first."""
    return run_modules((spd_step, spd_judging))
