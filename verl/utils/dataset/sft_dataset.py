"""Compatibility with verl: import path of `verl.data.sft_dataset`."""

from verl.data.sft_dataset import *  # noqa: F403
