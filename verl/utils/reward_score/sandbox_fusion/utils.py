"""Compatibility with verl: import path of `verl.reward.rules.sandbox_fusion.utils`."""

from verl.reward.rules.sandbox_fusion.utils import *  # noqa: F403
