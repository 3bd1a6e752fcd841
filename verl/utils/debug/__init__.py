"""Compatibility with verl: the older path of `verl.utils.profiler`, the same names."""

from verl.utils.profiler import *  # noqa: F403
