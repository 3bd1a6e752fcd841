"""Compatibility with verl: import path of `verl.workers.rollout.interactions.base`."""

import sys

from verl.workers.rollout.interactions import base

sys.modules[__name__] = base
