"""Rewards of single samples by asyncio, in Ray actors or in the trainer's process."""

from verl.experimental.reward_loop.reward_loop import RewardLoopManager, RewardLoopWorker
from verl.experimental.reward_loop.reward_model import RewardModelManager

__all__ = ["RewardLoopManager", "RewardLoopWorker", "RewardModelManager"]
