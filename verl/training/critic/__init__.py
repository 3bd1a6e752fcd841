"""The value model's side of PPO."""

from verl.training.critic.base import BasePPOCritic
from verl.training.critic.dp_critic import DataParallelPPOCritic

__all__ = ["BasePPOCritic", "DataParallelPPOCritic"]
