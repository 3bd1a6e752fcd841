"""Compatibility with verl: the older import path of `verl.utils.profiler.performance`."""

from verl.utils.profiler.performance import *  # noqa: F403
