"""Compatibility with verl: import path of `verl.reward.rules.gsm8k`."""

import sys

from verl.reward.rules import gsm8k

sys.modules[__name__] = gsm8k
