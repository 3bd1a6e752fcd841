"""Compatibility with verl: import path of `verl.reward.rules.math_dapo`."""

import sys

from verl.reward.rules import math_dapo

sys.modules[__name__] = math_dapo
