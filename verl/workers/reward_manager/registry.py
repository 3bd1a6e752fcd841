"""Compatibility with verl: import path of `verl.reward.managers.registry`."""

from verl.reward.managers.registry import *  # noqa: F403
