"""Compatibility with verl: import path of `verl.workers.rollout.tools.function_tool`."""

from verl.workers.rollout.tools.function_tool import *  # noqa: F403
