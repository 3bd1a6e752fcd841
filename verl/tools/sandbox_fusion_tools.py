"""Compatibility with verl: import path of `verl.workers.rollout.tools.sandbox_fusion_tools`."""

from verl.workers.rollout.tools.sandbox_fusion_tools import *  # noqa: F403
