"""Compatibility with verl: `verl.reward.managers.naive` with the constructor of the reward loop."""

from verl.experimental.reward_loop.reward_manager.base import with_loop_constructor
from verl.reward.managers import naive

NaiveRewardManager = with_loop_constructor(naive.NaiveRewardManager)
