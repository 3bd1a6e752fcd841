"""Compatibility with verl: import path of `verl.data.sampler`."""

from verl.data.sampler import *  # noqa: F403
