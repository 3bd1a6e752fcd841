"""Compatibility with verl: import path of `verl.training.checkpoint.checkpoint_manager`, and the newest checkpoint."""

import os
import re
from pathlib import Path

from verl.training.checkpoint.checkpoint_manager import BaseCheckpointManager, should_save_ckpt_esi  # noqa: F401
from verl.training.checkpoint.publish import TRACKER, CheckpointCorruptError


def read_tracker(root: str | os.PathLike) -> int | None:
    """The step in the tracker file; None without one."""
    file = Path(root) / TRACKER
    if not file.is_file():
        return None
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch("[0-9]{1,18}", text):
        raise CheckpointCorruptError(f"{file} holds {text[:40]!r} in place of a step number; remove it.")
    return int(text)


def get_checkpoint_tracker_filename(root_path: str) -> str:
    """File that holds the number of the newest published step."""
    return os.path.join(root_path, TRACKER)


def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
    """Folder that the tracker file in `path` points to; None without tracker or folder.

    It says nothing about the folder's files: publish.find_valid_checkpoint checks them.
    """
    if path is None:
        return None
    step = read_tracker(path)
    folder = None if step is None else Path(path) / directory_format.format(step)
    return str(folder) if folder is not None and folder.is_dir() else None
