"""Compatibility with verl: `verl.reward.managers.dapo` with the constructor of the reward loop."""

from verl.experimental.reward_loop.reward_manager.base import with_loop_constructor
from verl.reward.managers import dapo

DAPORewardManager = with_loop_constructor(dapo.DAPORewardManager)
