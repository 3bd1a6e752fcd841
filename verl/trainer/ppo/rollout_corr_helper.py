"""Compatibility with verl: the functions live in `verl.algos.rollout_correction`."""

from verl.algos.rollout_correction import *  # noqa: F403
