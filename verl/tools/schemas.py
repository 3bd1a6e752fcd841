"""Compatibility with verl: import path of `verl.workers.rollout.tools.schemas`."""

from verl.workers.rollout.tools.schemas import *  # noqa: F403
