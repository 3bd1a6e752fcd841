"""Compatibility with verl: import path of `verl.workers.rollout.tools.gsm8k_tool`."""

import sys

from verl.workers.rollout.tools import gsm8k_tool

sys.modules[__name__] = gsm8k_tool
