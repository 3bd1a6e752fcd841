"""Compatibility with verl: the settings live in `verl.config.model`."""

from verl.config.model import *  # noqa: F403
