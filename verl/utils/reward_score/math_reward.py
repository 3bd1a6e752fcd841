"""Compatibility with verl: import path of `verl.reward.rules.math_reward`."""

import sys

from verl.reward.rules import math_reward

sys.modules[__name__] = math_reward
