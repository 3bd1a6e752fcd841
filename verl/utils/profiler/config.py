"""Compatibility with verl: import path of `verl.config.profiler`."""

import sys

from verl.config import profiler

sys.modules[__name__] = profiler
