"""Compatibility with verl: import path of `verl.checkpoint.fsdp_checkpoint_manager`."""

from verl.checkpoint.fsdp_checkpoint_manager import *  # noqa: F403
