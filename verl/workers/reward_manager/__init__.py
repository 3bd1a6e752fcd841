"""Compatibility with verl: import path of `verl.reward.managers`, and of the batch manager."""
# ruff: noqa: F401

from verl.reward.managers import (
    AbstractRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
    RawRewardFn,
    get_reward_manager_cls,
    register,
)
from verl.reward.rows import RewardError
from verl.workers.reward_manager.batch import BatchRewardManager
