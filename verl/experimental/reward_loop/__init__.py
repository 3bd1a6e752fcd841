"""Compatibility with verl: the reward loop, which scores single samples by asyncio."""
# ruff: noqa: F401

from verl.experimental.reward_loop.reward_loop import RewardLoopManager, RewardLoopWorker
from verl.reward.served import RewardModelManager
