"""Compatibility with verl: import path of `verl.reward.rules.geo3k`."""

from verl.reward.rules.geo3k import *  # noqa: F403
