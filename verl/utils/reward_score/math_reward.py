"""Compatibility with verl: import path of `verl.reward.rules.math_reward`."""

from verl.reward.rules.math_reward import *  # noqa: F403
