"""The interface of a training engine."""

import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn

from verl.protocol import DataProto
from verl.training.parallel.sharding import BUCKET_BYTES
from verl.utils.accelerator import get_device_name
from verl.utils.registry import nearest


@dataclass(frozen=True)
class StepResult:
    """Gradient norm before clipping; `skipped`: loss or gradient was not finite on some rank, no rank stepped."""

    grad_norm: float
    skipped: bool


class BaseEngine(ABC):
    """Builds a model over ranks, then steps, saves and loads it. Every method is called on all ranks."""

    module: nn.Module
    #: whether parameters, and the optimizer's state, leave the accelerator outside of train_mode and eval_mode
    is_param_offload_enabled: bool
    is_optimizer_offload_enabled: bool

    @abstractmethod
    def initialize(self) -> None:
        """Builds model, optimizer and schedule."""

    @abstractmethod
    def train_mode(self) -> AbstractContextManager:
        """Parameters and optimizer on the device, dropout on; nests."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager:
        """Parameters on the device, dropout off; nests."""

    def unsharded(self) -> AbstractContextManager:
        """For many forwards of the same weights within eval_mode: what a forward gathers stays until the end."""
        return nullcontext()

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Drops the gradients."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, is_last_micro_batch: bool) -> None:
        """Adds the gradient of the scalar `loss`; after the last micro-batch it is the mean over the ranks."""

    @abstractmethod
    def optimizer_step(self) -> StepResult:
        """Clips, then steps; skips on all ranks when loss or gradient is not finite on any."""

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Moves the schedule on by one; returns the learning rate that holds now."""

    def forward_backward_batch(self, data: TensorDict, loss_function: Callable, forward_only: bool = False) -> dict:
        """Passes of all micro-batches, with gradients unless `forward_only`; see `verl.training.engine.batches`."""
        raise NotImplementedError(f"{type(self).__name__} has no forward_backward_batch.")

    def train_batch(self, data: TensorDict, loss_function: Callable) -> dict:
        """One optimizer step on a batch, within train_mode: what `forward_backward_batch` returns, and grad_norm."""
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function)
        outputs["metrics"]["grad_norm"] = self.optimizer_step().grad_norm
        return outputs

    def infer_batch(self, data: TensorDict, loss_function: Callable | None = None) -> dict:
        """What `forward_backward_batch` returns of a batch without gradients, within eval_mode."""
        return self.forward_backward_batch(data, loss_function, forward_only=True)

    @abstractmethod
    def get_per_tensor_param(
        self, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES, check_finite: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the model's files, full tensor in `dtype`) of every weight, adapters merged in.

        None keeps the weights' dtype. `bucket_bytes` are gathered at a time. With `check_finite` a NaN or infinite
        weight raises FloatingPointError before its bucket is handed out.
        """

    def get_adapter(self, check_finite: bool = False) -> tuple[Any, dict[str, torch.Tensor]]:
        """The LoRA adapter alone: its peft config, and full tensors by their names in peft's files."""
        raise NotImplementedError(
            f"{type(self).__name__} sends merged weights only: set actor_rollout_ref.rollout.lora_as_adapter=false."
        )

    @abstractmethod
    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves parameters and optimizer state; gradients lie with their parameters, whatever `grad` says."""

    @abstractmethod
    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None) -> None:
        """Writes into the folder `local_path`."""

    def save_is_finished(self) -> bool:
        """Whether the files of the last save_checkpoint are written; raises what went wrong in the background."""
        return True

    def nodes_that_see(self, path: str) -> list[tuple[str, bool]]:
        """(node, whether a file of this path exists there) for every rank."""
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (platform.node(), os.path.exists(path)))
        return everyone

    @abstractmethod
    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False) -> None:
        """Reads what save_checkpoint wrote, on any number of ranks."""

    def get_data_parallel_size(self) -> int:
        """Number of shares of a batch that are computed apart: the ranks, or groups of ranks that share sequences."""
        return dist.get_world_size()

    def get_data_parallel_rank(self) -> int:
        """This rank's share among them."""
        return dist.get_rank()

    def gather_over_sequence_group(self, data: DataProto) -> tuple[DataProto, slice]:
        """All-gather the batch over the sequence-parallel group: (its rows, the slice of this rank); by default all."""
        return data, slice(0, len(data))

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Their process group (None: the default one)."""
        return None

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank's outputs are to be collected: always, as every rank sees data of its own."""
        return True


class BaseEngineCtx:
    """Base of the contexts that train_mode and eval_mode of an engine of one's own return.

    On entering, `engine.mode` is "train" or "eval" and offloaded parameters (in "train" the optimizer's state too) go
    to the device; on leaving, they go back, and the mode is None. `disable_auto_offload=True` leaves them where they
    are.
    """

    def __init__(self, engine: BaseEngine, mode: str, **kwargs: Any) -> None:
        if mode not in ("train", "eval"):
            raise ValueError(f"mode={mode!r} is unknown. Known: train, eval.")
        self.engine, self.mode = engine, mode
        self.disable_auto_offload = kwargs.pop("disable_auto_offload", False)

    def __enter__(self) -> None:
        self.engine.mode = self.mode
        self._move(get_device_name())

    def __exit__(self, *raised: Any) -> None:
        self._move("cpu")
        self.engine.mode = None

    def _move(self, device: str) -> None:
        optimizer = self.engine.is_optimizer_offload_enabled and self.mode == "train"
        if not self.disable_auto_offload and (self.engine.is_param_offload_enabled or optimizer):
            self.engine.to(device, model=self.engine.is_param_offload_enabled, optimizer=optimizer)


class EngineRegistry:
    """Engine classes by (model type, backend, device)."""

    _engines: dict[tuple[str, str, str], type[BaseEngine]] = {}

    @classmethod
    def register(cls, model_type: str, backend: list[str] | str, device: list[str] | str = "cuda") -> Callable:
        """Class decorator: files an engine for each pair of the backends and devices."""

        def decorate(engine: type[BaseEngine]) -> type[BaseEngine]:
            for b in [backend] if isinstance(backend, str) else backend:
                for d in [device] if isinstance(device, str) else device:
                    cls._engines[(model_type, b, d)] = engine
            return engine

        return decorate

    @classmethod
    def get_engine_cls(cls, model_type: str, backend: str, device: str | None = None) -> type[BaseEngine]:
        """The engine for this type, backend (`actor.strategy`) and device."""
        key = (model_type, backend, device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if key not in cls._engines:
            name, known = "/".join(key), sorted("/".join(k) for k in cls._engines)
            raise ValueError(f"no engine for {name!r}{nearest(name, known) or '.'} Known: {', '.join(known)}.")
        return cls._engines[key]

    @classmethod
    def new(cls, model_type: str, backend: str, *args, **kwargs) -> BaseEngine:
        """Builds the engine for this type and backend; `device` among the keywords chooses the device."""
        return cls.get_engine_cls(model_type, backend, kwargs.get("device"))(*args, **kwargs)
