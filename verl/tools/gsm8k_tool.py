"""Compatibility with verl: import path of `verl.workers.rollout.tools.gsm8k_tool`."""

from verl.workers.rollout.tools.gsm8k_tool import *  # noqa: F403
