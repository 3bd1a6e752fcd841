"""Compatibility with verl: import path of `verl.workers.rollout.agent_loop`."""

from verl.workers.rollout.agent_loop import *  # noqa: F403
