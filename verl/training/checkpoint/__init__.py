"""Checkpoints: written completely or not at all, checked before they are read."""

from verl.training.checkpoint.checkpoint_manager import BaseCheckpointManager, should_save_ckpt_esi
from verl.training.checkpoint.publish import (
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
    "find_valid_checkpoint",
    "should_save_ckpt_esi",
    "verify_manifest",
]
