"""What every checkpoint manager shares, with verl's interface: contents that are requested, where checkpoints lie."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger

from verl.config.common import CheckpointConfig
from verl.training.checkpoint import publish, rng

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


class BaseCheckpointManager:
    """A subclass writes and reads the requested contents: model, optimizer, extra (schedule, generators), hf_model."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        checkpoint_config: CheckpointConfig | None = None,
    ):
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.processing_class = processing_class
        contents = checkpoint_config or CheckpointConfig()
        self.save_contents = tuple(contents["save_contents"])
        self.load_contents = tuple(contents["load_contents"])

    should_save_model = property(lambda self: "model" in self.save_contents)
    should_save_optimizer = property(lambda self: "optimizer" in self.save_contents)
    should_save_extra = property(lambda self: "extra" in self.save_contents)
    should_save_hf_model = property(lambda self: "hf_model" in self.save_contents)
    should_load_model = property(lambda self: "model" in self.load_contents)
    should_load_optimizer = property(lambda self: "optimizer" in self.load_contents)
    should_load_extra = property(lambda self: "extra" in self.load_contents)
    get_rng_state = staticmethod(rng.get_rng_state)
    load_rng_state = staticmethod(rng.load_rng_state)

    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False) -> None:
        """Reads load_contents from `local_path`."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it loads {local_path}")

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None) -> None:
        """Writes save_contents into `local_path`."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it saves {local_path}")

    def remove_previous_save_local_path(self, path: str | os.PathLike | list) -> None:
        """Removes what lies at a path, or at each of several; for subclasses that rotate their own folders."""
        for old in path if isinstance(path, list) else [path]:
            if os.path.lexists(old):
                publish.remove(Path(old))

    @staticmethod
    def checkpath(local_path: str | None, hdfs_path: str | None) -> str:
        """The folder to read from: `local_path`, else `hdfs_path`. ValueError without both."""
        if local_path is None and hdfs_path is None:
            raise ValueError("a checkpoint needs local_path or hdfs_path; both are None")
        return local_path if local_path is not None else hdfs_path


def should_save_ckpt_esi(max_steps_duration: float, save_ckpt_duration: float = 60, redundant_time: float = 0) -> bool:
    """Whether to save now: a rented instance ends before another step and a save are done. Durations in seconds.

    The end, in seconds since the epoch, is the number in MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP, else in
    SAGEMAKER_EXPIRATION_TIMESTAMP. False without one, after it, and if `max_steps_duration` is 0 (no step yet).
    """
    for variable in ("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", "SAGEMAKER_EXPIRATION_TIMESTAMP"):
        if variable in os.environ:
            try:
                left = float(os.environ[variable]) - time.time()
            except ValueError:
                logger.warning("{}={!r} is not a time in seconds; it is ignored", variable, os.environ[variable])
                continue
            needed = save_ckpt_duration + max_steps_duration + redundant_time
            return max_steps_duration > 0 and 0 < left <= needed
    return False
