"""Compatibility with verl: managers of single samples by name, with the constructor of the reward loop."""
# ruff: noqa: F401

from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
from verl.experimental.reward_loop.reward_manager.limited import RateLimitedRewardManager
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.experimental.reward_loop.reward_manager.registry import get_reward_manager_cls, register
from verl.experimental.reward_loop.reward_manager.remote import RemoteRewardManager
