"""Compatibility with verl: import path of `verl.reward.managers.base`."""

from verl.reward.managers.base import *  # noqa: F403
