"""Compatibility with verl: import path of `verl.workers.rollout.interactions.gsm8k_interaction`."""

from verl.workers.rollout.interactions.gsm8k_interaction import *  # noqa: F403
