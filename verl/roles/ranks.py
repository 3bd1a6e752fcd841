"""What every role does on a rank: joining the others, sharing batch sizes out, updates, checkpoints."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from verl.config.actor import ActorConfig
from verl.config.base import BaseConfig
from verl.config.common import CheckpointConfig
from verl.config.compose import to_settings, with_values
from verl.config.critic import CriticConfig
from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.config.profiler import ProfilerConfig
from verl.profiling.profile import DistProfiler
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.dispatch import Dispatch, register
from verl.single_controller.base.profiling import DistProfilerExtension
from verl.training.engine.fsdp import FSDPEngine
from verl.training.flops_counter import FlopsCounter
from verl.utils.accelerator import get_device_name, rank_device_index
from verl.utils.distributed import initialize_global_process_group_ray

Role = TypeVar("Role", ActorConfig, CriticConfig)


class ModelWorker(Worker, DistProfilerExtension):
    """A rank that holds one model in `engine`, which a subclass's init_model builds.

    `config` is the role's section, a composed one or of the class `config_type`.
    """

    config_type: type[BaseConfig]
    engine: FSDPEngine

    def __init__(
        self, config: Any, device_name: str | None = None, nccl_timeout: float | None = None,
        peak_tflops: float | None = None, **kwargs,
    ) -> None:  # fmt: skip
        Worker.__init__(self)
        self.config = to_settings(config, self.config_type)
        DistProfilerExtension.__init__(self, DistProfiler(self.rank, self.profiler_config(self.config)))
        self.nccl_timeout = nccl_timeout
        self.peak_tflops = peak_tflops
        self.device_name = get_device_name() if device_name is None else device_name

    @staticmethod
    def profiler_config(section: Any) -> ProfilerConfig:
        """The profiler settings of a role's section."""
        return ProfilerConfig() if section.profiler is None else section.profiler

    def join_ranks(self, *meshes: str) -> None:
        """Choose this rank's GPU, join the process group, and take a share of every batch sent to `meshes`."""
        if self.device_name == "cuda":
            torch.cuda.set_device(rank_device_index())
        initialize_global_process_group_ray(timeout_second=self.nccl_timeout)
        for mesh in meshes:
            self._register_dispatch_collect_info(mesh_name=mesh, dp_rank=self.rank, is_collect=True)

    def make_engine(
        self, section: str, model: HFModelConfig, engine: FSDPEngineConfig, optim: FSDPOptimizerConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
    ) -> FSDPEngine:
        """The engine of this rank, by settings of the config's `section`; without `optim` the model is not trained."""
        return FSDPEngine.of_section(
            section, model, engine, optim, checkpoint or CheckpointConfig(), device=self.device_name
        )

    def updated(self, role: str, update: Callable[[DataProto], dict], data: DataProto, passes: int) -> dict[str, Any]:
        """The metrics of an update of `passes` epochs on this rank's share, after which the schedule goes on by one."""
        started = time.perf_counter()
        metrics = update(data)
        metrics |= self.utilisation(role, data, time.perf_counter() - started, passes)
        metrics[f"{role}/lr"] = self.engine.lr_scheduler.get_last_lr()[0]  # the rate of this update
        self.engine.lr_scheduler_step()
        return metrics

    def utilisation(self, role: str, data: DataProto, seconds: float, passes: int) -> dict[str, float]:
        """perf/mfu/<role>: FLOPs of `passes` updates on all ranks' samples over what the GPUs could do in that time.

        Empty where the device's peak (trainer.peak_tflops) or the kind of model is unknown, as on CPUs.
        """
        counter = FlopsCounter(getattr(self.engine.module, "config", None), self.peak_tflops)
        share = counter.utilisation(data.meta_info.get("global_token_num", ()), seconds, self.world_size)
        return {f"perf/mfu/{role}": passes * share} if share else {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None) -> None:
        """Write the model's part into `local_path`; all ranks take part."""
        self.engine.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_is_finished(self) -> bool:
        """Whether the files of the last save_checkpoint are written (checkpoint.async_save)."""
        return self.engine.save_is_finished()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nodes_that_see(self, path: str) -> list[tuple[str, bool]]:
        """(node, whether a file of this path exists there) for every rank."""
        return self.engine.nodes_that_see(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False) -> None:
        """Read the model's part, written on any number of ranks."""
        self.engine.load_checkpoint(local_path, hdfs_path, del_local_after_load)


def per_rank_sizes(section: Role, key: str, n: int, ranks: int) -> Role:
    """The settings of `actor` or `critic` with batch sizes that count one rank's samples (prompts * n / ranks).

    Micro-batches are set per rank. Raises ValueError, naming `key`, where ranks cannot share a mini-batch evenly.
    """
    samples = section.ppo_mini_batch_size * n
    if samples % ranks:
        raise ValueError(
            f"{key}.ppo_mini_batch_size={section.ppo_mini_batch_size} x rollout.n={n} gives {samples} samples, which "
            f"{ranks} ranks cannot share evenly. Use a multiple of {ranks}."
        )
    sizes: dict[str, int | None] = {"ppo_mini_batch_size": samples // ranks}
    for name in ("ppo_micro_batch_size", "forward_micro_batch_size"):
        if name in section and section[name] is not None:
            sizes |= {f"{name}_per_gpu": max(1, section[name] // ranks), name: None}
    return with_values(section, sizes)
