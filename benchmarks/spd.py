"""Benchmarks of the speculative-decoding scorer: a training step, judging during decoding, completions."""

from benchmarks import spd_completions, spd_judging, spd_step
from benchmarks.harness import Row, say


def run() -> list[Row]:
    """All rows, the step's first."""
    rows: list[Row] = []
    for module in (spd_step, spd_judging, spd_completions):
        say(module.__doc__)
        rows += module.run()
    return rows
