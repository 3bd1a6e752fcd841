"""Compatibility with verl: import path of `verl.workers.rollout.agent_loop.tool_parser`."""

from verl.workers.rollout.agent_loop.tool_parser import *  # noqa: F403
