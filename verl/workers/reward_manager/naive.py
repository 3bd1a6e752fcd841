"""Compatibility with verl: import path of `verl.reward.managers.naive`."""

from verl.reward.managers.naive import *  # noqa: F403
