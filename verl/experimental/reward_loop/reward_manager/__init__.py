"""Managers of the reward loop, by name: naive, dapo, rate_limited, remote."""

from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
from verl.experimental.reward_loop.reward_manager.limited import RateLimitedRewardManager
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.experimental.reward_loop.reward_manager.registry import get_reward_manager_cls, register
from verl.experimental.reward_loop.reward_manager.remote import RemoteRewardManager

__all__ = [
    "DAPORewardManager", "NaiveRewardManager", "RateLimitedRewardManager", "RemoteRewardManager",
    "get_reward_manager_cls", "register",
]  # fmt: skip
