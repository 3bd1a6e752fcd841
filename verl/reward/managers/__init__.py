"""Reward managers: naive, dapo, prime, rate_limited, remote; batch; a user's own through the registry."""

from verl.reward.managers.base import (
    AbstractRewardManager,
    RawRewardFn,
    RewardManagerBase,
    SampleRewardManager,
    get_reward_manager_cls,
    register,
)
from verl.reward.managers.dapo import DAPORewardManager
from verl.reward.managers.limited import RateLimitedRewardManager
from verl.reward.managers.naive import NaiveRewardManager
from verl.reward.managers.prime import PrimeRewardManager
from verl.reward.managers.remote import RemoteRewardManager

__all__ = [
    "AbstractRewardManager", "DAPORewardManager", "NaiveRewardManager", "PrimeRewardManager",
    "RateLimitedRewardManager", "RawRewardFn", "RemoteRewardManager", "RewardManagerBase", "SampleRewardManager",
    "get_reward_manager_cls", "register",
]  # fmt: skip
