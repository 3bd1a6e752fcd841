"""Compatibility with verl: import path of `verl.reward.rules.prime_code`."""

from verl.reward.rules.prime_code import *  # noqa: F403
