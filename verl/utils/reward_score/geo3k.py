"""Compatibility with verl: import path of `verl.reward.rules.geo3k`."""

import sys

from verl.reward.rules import geo3k

sys.modules[__name__] = geo3k
