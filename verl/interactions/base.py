"""Compatibility with verl: import path of `verl.workers.rollout.interactions.base`."""

from verl.workers.rollout.interactions.base import *  # noqa: F403
