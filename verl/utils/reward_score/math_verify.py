"""Compatibility with verl: import path of `verl.reward.rules.math_verify`."""

from verl.reward.rules.math_verify import *  # noqa: F403
