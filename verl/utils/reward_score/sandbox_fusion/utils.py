"""Compatibility with verl: import path of `verl.reward.rules.sandbox_fusion.utils`."""

import sys

from verl.reward.rules.sandbox_fusion import utils

sys.modules[__name__] = utils
