"""Compatibility with verl: the settings live in `verl.config.algorithm`."""

from verl.config.algorithm import *  # noqa: F403
