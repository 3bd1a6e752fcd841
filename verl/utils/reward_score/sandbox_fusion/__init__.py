"""Compatibility with verl: import path of `verl.reward.rules.sandbox_fusion`."""

from verl.reward.rules.sandbox_fusion import *  # noqa: F403
