"""Compatibility with verl: import path of `verl.workers.rollout.tools.base_tool`."""

from verl.workers.rollout.tools.base_tool import *  # noqa: F403
