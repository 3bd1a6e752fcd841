"""Compatibility with verl: import path of `verl.config.profiler`."""

from verl.config.profiler import *  # noqa: F403
