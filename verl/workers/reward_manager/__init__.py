"""Reward managers: naive, batch, dapo, prime, your own through the registry."""

from verl.workers.reward_manager.abstract import AbstractRewardManager, RawRewardFn
from verl.workers.reward_manager.batch import BatchRewardManager
from verl.workers.reward_manager.dapo import DAPORewardManager
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.prime import PrimeRewardManager
from verl.workers.reward_manager.registry import get_reward_manager_cls, register
from verl.workers.reward_manager.reward_rows import RewardError

__all__ = [
    "AbstractRewardManager", "BatchRewardManager", "DAPORewardManager", "NaiveRewardManager",
    "PrimeRewardManager", "RawRewardFn", "RewardError", "get_reward_manager_cls", "register",
]  # fmt: skip
