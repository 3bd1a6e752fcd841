"""Compatibility with verl: import path of `verl.workers.rollout.interactions.gsm8k_interaction`."""

import sys

from verl.workers.rollout.interactions import gsm8k_interaction

sys.modules[__name__] = gsm8k_interaction
