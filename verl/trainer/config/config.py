"""Compatibility with verl: the settings live in `verl.config.common`."""

from verl.config.common import *  # noqa: F403
