"""Compatibility with verl: import path of the Ray-facing roles on FSDP engines."""
# ruff: noqa: F401

from verl.single_controller.base.dispatch import Dispatch, register
from verl.utils.fsdp_utils import create_device_mesh
from verl.workers.roles.actor_rollout_ref import ActorRolloutRefWorker
from verl.workers.roles.critic import CriticWorker
from verl.workers.roles.reward_model import RewardModelWorker


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
