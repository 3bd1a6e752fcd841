"""Benchmarks of asynchronous training: its speed, its accuracy, and how well the simulation predicts it."""

from benchmarks import async_accuracy, async_simulated, async_speed
from benchmarks.harness import Row, run_modules

MODULES = (async_speed, async_simulated, async_accuracy)


def run() -> list[Row]:
    """All rows."""
    return run_modules(MODULES)
