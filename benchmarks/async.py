"""Benchmarks of asynchronous training: its speed and its accuracy."""

from benchmarks import async_accuracy, async_speed
from benchmarks.harness import Row, run_modules

MODULES = (async_speed, async_accuracy)


def run() -> list[Row]:
    """All rows."""
    return run_modules(MODULES)
