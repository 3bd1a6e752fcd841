"""Compatibility with verl: import path of `verl.reward.served`."""

import sys

from verl.reward import served

sys.modules[__name__] = served
