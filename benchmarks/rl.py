"""The text trainer's figures: log-probs, shared prompts and padding, DataProto."""

from __future__ import annotations

from benchmarks import dataproto, rl_forward, rl_logprob
from benchmarks.harness import Row, say


def run() -> list[Row]:
    """All rows."""
    rows: list[Row] = []
    for module in (rl_forward, rl_logprob, dataproto):
        say(module.__doc__)
        rows += module.run()
    return rows
