"""Compatibility with verl: import path of `verl.checkpoint`."""
# ruff: noqa: F401

from verl.checkpoint import (
    BaseCheckpointManager,
    CheckpointCorruptError,
    CheckpointWriteError,
    CheckpointWriter,
    find_valid_checkpoint,
    should_save_ckpt_esi,
    verify_manifest,
)
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, get_checkpoint_tracker_filename
