"""Rollouts: engines that turn prompts into answers."""

from verl.workers.rollout.base import BaseRollout, get_rollout_class, register_rollout

__all__ = ["BaseRollout", "get_rollout_class", "register_rollout"]
