"""Compatibility with verl: import path of `verl.reward.rules.gsm8k`."""

from verl.reward.rules.gsm8k import *  # noqa: F403
