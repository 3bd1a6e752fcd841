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
    zero3, zero2 = ("FULL_SHARD", "HYBRID_SHARD"), ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    if device_mesh.ndim not in (1, 2):
        raise NotImplementedError(f"FSDP1 has no strategy for a mesh of {device_mesh.ndim} dimensions; known: 1, 2.")
    return ShardingStrategy[(zero3 if zero3_enable else zero2)[device_mesh.ndim - 1]]


def get_vl_model_vision_tower(vl_model_instance: Any) -> Any:
    """The model's part that reads images, where transformers keeps it; None without one."""
    owners = (getattr(vl_model_instance, "model", None), vl_model_instance)
    towers = (getattr(owner, name, None) for owner in owners for name in ("visual", "vision_tower"))
    return next((tower for tower in towers if tower is not None), None)


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

    wake_up, sleep = ActorRolloutRefWorker.rollout_mode, ActorRolloutRefWorker.trainer_mode
