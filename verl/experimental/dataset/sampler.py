"""Compatibility with verl: import path of `verl.data.sampler`."""

import sys

from verl.data import sampler

sys.modules[__name__] = sampler
