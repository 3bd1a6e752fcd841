"""Compatibility with verl: import path of `verl.workers.rollout.interactions.interaction_registry`."""

from verl.workers.rollout.interactions.interaction_registry import *  # noqa: F403
