"""Import path of the Ray-facing roles on FSDP engines."""

from __future__ import annotations

from verl.utils.fsdp_utils import create_device_mesh
from verl.workers.roles.actor_rollout_ref import ActorRolloutRefWorker

__all__ = ["ActorRolloutRefWorker", "create_device_mesh"]
