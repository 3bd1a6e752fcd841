"""Compatibility with verl: import path of `verl.checkpoint`."""
# ruff: noqa: F401

from verl.checkpoint import (
    BaseCheckpointManager,
    CheckpointCorruptError,
    CheckpointWriteError,
    CheckpointWriter,
    find_latest_ckpt_path,
    find_valid_checkpoint,
    get_checkpoint_tracker_filename,
    should_save_ckpt_esi,
    verify_manifest,
)
