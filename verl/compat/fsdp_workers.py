"""Compatibility with verl: import path of the Ray-facing roles on FSDP engines."""
# ruff: noqa: F401

import os
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from verl.roles import actor_rollout_ref
from verl.roles.critic import CriticWorker
from verl.roles.reward_model import RewardModelWorker
from verl.single_controller.base.dispatch import Dispatch, register
from verl.training.parallel.sharding import create_device_mesh


def get_sharding_strategy(device_mesh: DeviceMesh, zero3_enable: bool = True) -> ShardingStrategy:
    """FSDP1's strategy for a mesh of one dimension, or of two: replicas of shards. FSDP2 needs none."""
    if device_mesh.ndim == 1:
        return ShardingStrategy.FULL_SHARD if zero3_enable else ShardingStrategy.SHARD_GRAD_OP
    if device_mesh.ndim == 2:
        return ShardingStrategy.HYBRID_SHARD if zero3_enable else ShardingStrategy._HYBRID_SHARD_ZERO2
    raise NotImplementedError(f"FSDP1 has no strategy for a mesh of {device_mesh.ndim} dimensions; known: 1, 2.")


def get_vl_model_vision_tower(vl_model_instance: Any) -> Any:
    """The model's part that reads images, where transformers keeps it; None without one."""
    for owner in (getattr(vl_model_instance, "model", None), vl_model_instance):
        if (tower := getattr(owner, "visual", None) or getattr(owner, "vision_tower", None)) is not None:
            return tower
    return None


class ActorRolloutRefWorker(actor_rollout_ref.ActorRolloutRefWorker):
    """As verl.roles.actor_rollout_ref.ActorRolloutRefWorker, with memory snapshots when they are asked for."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def dump_memory_snapshot(self, tag: str = "manual", sub_dir: str | None = None) -> None:
        """Write a snapshot of this rank's CUDA memory; nothing without CUDA. profiler.tool=torch_memory does it too."""
        if torch.cuda.is_available():
            folder = os.path.join("outputs", "profile", *([sub_dir] if sub_dir else []))
            os.makedirs(folder, exist_ok=True)
            torch.cuda.memory._dump_snapshot(os.path.join(folder, f"memory_{tag}_rank{self.rank}.pickle"))


class AsyncActorRolloutRefWorker(ActorRolloutRefWorker):
    """The worker for rollout.mode=async by verl's name. ActorRolloutRefWorker serves both modes."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wake_up(self) -> bool:
        """`rollout_mode`."""
        return self.rollout_mode()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """`trainer_mode`."""
        self.trainer_mode()
