"""Benchmarks of the text trainer: shared prompts and padding, rollouts, full steps."""

from benchmarks import rl_forward, rl_rollout, rl_whole_step
from benchmarks.harness import Row, say

MODULES = (rl_forward, rl_rollout, rl_whole_step)


def run() -> list[Row]:
    """The rows of all modules; each has `run`, and its docstring says what it measures."""
    rows: list[Row] = []
    for module in MODULES:
        say(module.__doc__)
        rows += module.run()
    return rows
