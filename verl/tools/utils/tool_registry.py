"""Compatibility with verl: import path of `verl.workers.rollout.tools.tool_registry`."""

from verl.workers.rollout.tools.tool_registry import *  # noqa: F403
