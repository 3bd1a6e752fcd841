"""Compatibility with verl: saves and resumes an engine, or a group of workers, for trainers of one's own."""

import re
import time
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.checkpoint.publish import CheckpointWriter, find_valid_checkpoint


class OrchestrationMode(Enum):
    """Whether every rank runs the handler, or one process that calls workers."""

    SPMD = 0
    RAY = 1


def extract_step(path: str) -> int | None:
    """The N of a path that has global_step_N in it; None without one."""
    found = re.search(r"global_step_(\d+)", path)
    return int(found[1]) if found else None


class CheckpointHandler:
    """Publishes global_step_N of an engine and of a data loader that has a state, and finds the one to resume."""

    def __init__(
        self, engine: Any, train_dataloader: Any, *, default_local_dir: str, max_ckpt_to_keep: int | None = None,
        default_hdfs_dir: str | None = None, resume_mode: str = "auto", resume_from_path: str | None = None,
        mode: OrchestrationMode = OrchestrationMode.SPMD,
    ) -> None:
        if default_hdfs_dir is not None:
            raise ValueError("CheckpointHandler writes to a local folder; trainer.default_hdfs_dir copies it.")
        if resume_mode not in ("auto", "disable", "resume_path"):
            raise ValueError(f"resume_mode={resume_mode!r} is unknown. Known: auto, disable, resume_path.")
        if resume_mode == "resume_path" and extract_step(resume_from_path or "") is None:
            raise ValueError(f"resume_from_path={resume_from_path!r} names no folder global_step_N.")
        self.engine, self.train_dataloader = engine, train_dataloader
        self.root, self.max_to_keep = Path(default_local_dir), max_ckpt_to_keep
        self.resume_mode, self.resume_from_path = resume_mode, resume_from_path
        self.is_one_of_many = mode is OrchestrationMode.SPMD and dist.is_initialized()
        self.rank = dist.get_rank() if self.is_one_of_many else 0

    def save_checkpoint(self, step: int) -> None:
        """Write global_step_<step>; it appears once every rank has written its part."""
        writer = CheckpointWriter(self.root, step, self.max_to_keep)
        if self.rank == 0:
            writer.__enter__()
        self._wait()
        try:
            self.engine.save_checkpoint(local_path=str(writer.path), global_step=step)
            while not getattr(self.engine, "save_is_finished", lambda: True)():
                time.sleep(0.05)
            if hasattr(self.train_dataloader, "state_dict"):
                torch.save(self.train_dataloader.state_dict(), writer.path / f"data_{self.rank}.pt")
        except BaseException as error:
            if self.rank == 0:
                writer.__exit__(type(error), error, None)
            raise
        self._wait()
        if self.rank == 0:
            writer.__exit__(None, None, None)
        self._wait()

    def load_checkpoint(self) -> int:
        """Resume as resume_mode says; the step of the checkpoint, 0 for a run that begins."""
        folder: Path | None = None
        if self.resume_mode == "resume_path":
            folder = Path(str(self.resume_from_path))
        elif self.resume_mode == "auto":
            folder = find_valid_checkpoint(self.root)
        if folder is None:
            return 0
        self.engine.load_checkpoint(str(folder))
        state = folder / f"data_{self.rank}.pt"
        if state.is_file() and hasattr(self.train_dataloader, "load_state_dict"):
            self.train_dataloader.load_state_dict(torch.load(state, weights_only=True))
        return extract_step(folder.name) or 0

    def _wait(self) -> None:
        if self.is_one_of_many:
            dist.barrier()
