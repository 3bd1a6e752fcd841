"""Import path of the Ray-facing roles on FSDP engines."""

from verl.utils.fsdp_utils import create_device_mesh
from verl.workers.roles.actor_rollout_ref import ActorRolloutRefWorker
from verl.workers.roles.critic import CriticWorker
from verl.workers.roles.reward_model import RewardModelWorker

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker", "create_device_mesh"]
