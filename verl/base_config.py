"""Compatibility with verl: import path of `verl.config.base`."""

from verl.config.base import *  # noqa: F403
