"""Compatibility with verl: import path of `verl.trainer.ppo.rollout_skip`."""

from verl.trainer.ppo.rollout_skip import *  # noqa: F403
