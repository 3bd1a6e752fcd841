"""Compatibility with verl: `verl.reward.managers.remote` with the constructor of the reward loop."""

import ray

from verl.experimental.reward_loop.reward_manager.base import with_loop_constructor
from verl.reward.managers import remote

RewardComputeWorker = ray.remote(num_cpus=0)(remote.RewardComputeWorker)
RemoteRewardManager = with_loop_constructor(remote.RemoteRewardManager)
