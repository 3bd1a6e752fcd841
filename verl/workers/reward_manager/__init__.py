"""Compatibility with verl: import path of `verl.reward.managers`, and of the batch manager."""

from verl.reward.managers import *  # noqa: F403
from verl.reward.rows import RewardError  # noqa: F401
from verl.workers.reward_manager.batch import BatchRewardManager  # noqa: F401
