"""Compatibility with verl: import path of `verl.workers.rollout.tools.search_tool`."""

from verl.workers.rollout.tools.search_tool import *  # noqa: F403
