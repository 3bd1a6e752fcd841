"""Compatibility with verl: the settings live in `verl.config.rollout`."""

from verl.config.rollout import *  # noqa: F403
