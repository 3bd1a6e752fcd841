"""Compatibility with verl: import path of `verl.reward.managers.dapo`."""

from verl.reward.managers.dapo import *  # noqa: F403
