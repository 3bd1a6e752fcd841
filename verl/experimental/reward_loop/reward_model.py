"""Compatibility with verl: import path of `verl.reward.served`."""

from verl.reward.served import *  # noqa: F403
