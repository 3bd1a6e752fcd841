"""Compatibility with verl: import path of `verl.workers.rollout.interactions.interaction_registry`."""

import sys

from verl.workers.rollout.interactions import interaction_registry

sys.modules[__name__] = interaction_registry
