"""Compatibility with verl: import path of `verl.data.dynamicgen_dataset`."""

from verl.data.dynamicgen_dataset import *  # noqa: F403
