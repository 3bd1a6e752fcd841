"""Compatibility with verl: import path of `verl.reward.rules.math_dapo`."""

from verl.reward.rules.math_dapo import *  # noqa: F403
