"""Compatibility with verl: import path of `verl.reward.managers.dapo`."""

import sys

from verl.reward.managers import dapo

sys.modules[__name__] = dapo
