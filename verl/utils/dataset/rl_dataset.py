"""Compatibility with verl: import path of `verl.data.rl_dataset`."""

from verl.data.rl_dataset import *  # noqa: F403
