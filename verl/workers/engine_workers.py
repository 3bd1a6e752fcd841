"""Compatibility with verl: the workers of verl's model engine, on FSDPEngine."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from verl.config.common import CheckpointConfig
from verl.config.profiler import ProfilerConfig
from verl.profiling.profile import DistProfiler
from verl.single_controller.base import Worker
from verl.single_controller.base.dispatch import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.base.profiling import DistProfilerExtension
from verl.utils import tensordict_utils as tu
from verl.utils.accelerator import get_device_name, rank_device_index
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config.engine import TrainingWorkerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.roles.actor_rollout_ref import ActorRolloutRefWorker

__all__ = ["ActorRolloutRefWorker", "TrainingWorker", "TrainingWorkerConfig"]

_SHARED = make_nd_compute_dataproto_dispatch_fn(mesh_name="train")


class TrainingWorker(Worker, DistProfilerExtension):
    """A rank of one engine and a loss function (model_output=, data=, dp_group=) -> (loss, metrics).

    `reset` builds the model. Batches are TensorDicts with the columns of `verl.workers.engine.batches`; each rank gets
    its share of their rows.
    """

    def __init__(self, config: TrainingWorkerConfig) -> None:
        Worker.__init__(self)
        profiler = config.profiler_config or ProfilerConfig()
        DistProfilerExtension.__init__(self, DistProfiler(self.rank, profiler))
        device = get_device_name()
        if device == "cuda":
            torch.cuda.set_device(rank_device_index())
        if self.world_size > 1:
            initialize_global_process_group_ray()
        self.config, self.loss_fn = config, None
        self.engine = EngineRegistry.new(
            config.model_type or "language_model", config.engine_config.strategy, config.model_config,
            config.engine_config, config.optimizer_config, config.checkpoint_config or CheckpointConfig(),
            device=device,
        )  # fmt: skip
        self._register_dispatch_collect_info(mesh_name="train", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        """Build model, optimizer and schedule from the settings, also a second time."""
        self.engine.initialize()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parameters and optimizer state to "cpu" or the ranks' "device"."""
        self.engine.to(self.engine.device_type if device == "device" else device, model, optimizer, grad)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: Callable) -> None:
        """Set the loss function of train_batch, and of infer_batch unless it gets compute_loss=False."""
        self.loss_fn = loss_fn

    @register(dispatch_mode=_SHARED)
    def train_batch(self, data: TensorDict) -> TensorDict:
        """One optimizer step on the batch: metrics loss, grad_norm and those of the loss function, means over ranks.

        With update_lr_scheduler=True among the values of the full batch the schedule moves on, with the metric lr.
        Raises RuntimeError without a loss function.
        """
        if self.loss_fn is None:
            raise RuntimeError("TrainingWorker has no loss function; call set_loss_fn first.")
        with self.engine.train_mode():
            outputs = self.engine.train_batch(data, self.loss_fn)
        metrics = self._over_ranks(outputs)
        if tu.get(data, "update_lr_scheduler", False):
            metrics["lr"] = self.engine.lr_scheduler_step()
        return tu.get_tensordict({}, {"metrics": metrics})

    @register(dispatch_mode=_SHARED)
    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        """A step for each mini-batch; metrics are lists with one entry for each.

        Values of the full batch: mini_batch_size (rows over all ranks; by default the batch), epochs (1), seed (42),
        dataloader_kwargs. The schedule moves on after the last step.
        """
        ranks = self.engine.get_data_parallel_size()
        rows = tu.get(data, "mini_batch_size", len(data) * ranks)
        if rows % ranks:
            raise ValueError(f"mini_batch_size={rows} cannot be shared evenly by {ranks} ranks; use a multiple of it.")
        epochs = tu.get(data, "epochs", 1)
        options = (tu.get(data, "seed", 42), tu.get(data, "dataloader_kwargs", {}))
        steps, metrics = epochs * (len(data) // (rows // ranks)), defaultdict(list)
        for number, mini in enumerate(tu.make_iterator(data, rows // ranks, epochs, *options), start=1):
            tu.assign_non_tensor(mini, update_lr_scheduler=number == steps)
            for name, value in tu.get(self.train_batch(mini), "metrics").items():
                metrics[name].append(value)
        return tu.get_tensordict({}, {"metrics": dict(metrics)})

    @register(dispatch_mode=_SHARED)
    def infer_batch(self, data: TensorDict) -> TensorDict:
        """log_probs, and entropy with calculate_entropy=True, of the batch's tokens; metrics of the loss function."""
        computes = self.loss_fn is not None and tu.get(data, "compute_loss", True)
        with self.engine.eval_mode():
            outputs = self.engine.infer_batch(data, self.loss_fn if computes else None)
        metrics = self._over_ranks(outputs) if computes else {}
        return tu.get_tensordict(outputs["model_output"], {"metrics": metrics})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None) -> None:
        """Write model, optimizer and schedule into `local_path`."""
        self.engine.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False) -> None:
        """Read what save_checkpoint wrote, on any number of ranks."""
        self.engine.load_checkpoint(local_path, hdfs_path, del_local_after_load)

    def _over_ranks(self, outputs: dict[str, Any]) -> dict[str, float]:
        """The metrics of a batch: micro-batches' losses add up, the others are means; then means over the ranks."""
        metrics = {name: sum(value) / len(value) if isinstance(value, list) else value
                   for name, value in outputs["metrics"].items()}  # fmt: skip
        metrics = {"loss": sum(outputs["loss"]), **metrics}
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, metrics)
        return {name: sum(each[name] for each in everyone) / len(everyone) for name in metrics}
