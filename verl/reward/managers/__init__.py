"""Reward managers, which score batches; users register their own."""

from verl.reward.managers.base import (
    AbstractRewardManager,
    RawRewardFn,
    RewardManagerBase,
    SampleRewardManager,
    get_reward_manager_cls,
    register,
)
from verl.reward.managers.batch import BatchRewardManager
from verl.reward.managers.dapo import DAPORewardManager
from verl.reward.managers.limited import RateLimitedRewardManager
from verl.reward.managers.naive import NaiveRewardManager
from verl.reward.managers.prime import PrimeRewardManager
from verl.reward.managers.remote import RemoteRewardManager

__all__ = [
    "AbstractRewardManager", "BatchRewardManager", "DAPORewardManager", "NaiveRewardManager", "PrimeRewardManager",
    "RateLimitedRewardManager", "RawRewardFn", "RemoteRewardManager", "RewardManagerBase", "SampleRewardManager",
    "get_reward_manager_cls", "register",
]  # fmt: skip
