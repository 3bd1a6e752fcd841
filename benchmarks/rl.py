"""Benchmarks of the text trainer: shared prompts and padding, rollouts, full steps."""

from benchmarks import rl_forward, rl_rollout, rl_whole_step
from benchmarks.harness import Row, run_modules

MODULES = (rl_forward, rl_rollout, rl_whole_step)


def run() -> list[Row]:
    """All rows."""
    return run_modules(MODULES)
