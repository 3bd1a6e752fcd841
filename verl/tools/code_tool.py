"""Compatibility with verl: import path of `verl.workers.rollout.tools.code_tool`."""

from verl.workers.rollout.tools.code_tool import *  # noqa: F403
