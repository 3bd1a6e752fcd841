"""Checkpoints: written completely or not at all, checked before they are read."""

from verl.checkpoint.checkpoint_manager import (
    BaseCheckpointManager,
    find_latest_ckpt_path,
    get_checkpoint_tracker_filename,
    should_save_ckpt_esi,
)
from verl.checkpoint.publish import (
    CheckpointCorruptError,
    CheckpointWriteError,
    CheckpointWriter,
    find_valid_checkpoint,
    verify_manifest,
)

__all__ = [
    "BaseCheckpointManager",
    "CheckpointCorruptError",
    "CheckpointWriteError",
    "CheckpointWriter",
    "find_latest_ckpt_path",
    "find_valid_checkpoint",
    "get_checkpoint_tracker_filename",
    "should_save_ckpt_esi",
    "verify_manifest",
]
