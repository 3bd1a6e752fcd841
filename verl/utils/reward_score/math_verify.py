"""Compatibility with verl: import path of `verl.reward.rules.math_verify`."""

import sys

from verl.reward.rules import math_verify

sys.modules[__name__] = math_verify
