"""Compatibility with verl: import path of `verl.workers.rollout.agent_loop.prometheus_utils`."""

from verl.workers.rollout.agent_loop.prometheus_utils import *  # noqa: F403
