"""Compatibility with verl: import path of `verl.reward.managers.base`."""

import sys

from verl.reward.managers import base

sys.modules[__name__] = base
