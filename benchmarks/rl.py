"""Benchmarks of the text trainer: log-probs, shared prompts and padding, DataProto, Ray, rollouts, full steps."""

from benchmarks import dataproto, rl_forward, rl_logprob, rl_rollout, rl_transport, rl_whole_step
from benchmarks.harness import Row, run_modules

MODULES = (rl_forward, rl_logprob, dataproto, rl_transport, rl_rollout, rl_whole_step)


def run() -> list[Row]:
    """All rows."""
    return run_modules(MODULES)
