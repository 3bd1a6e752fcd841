"""Compatibility with verl: the settings live in `verl.config.reward_model`."""

from verl.config.reward_model import *  # noqa: F403
