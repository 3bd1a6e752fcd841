"""Compatibility with verl: import path of `verl.profiling.performance`."""

import sys

from verl.profiling import performance

sys.modules[__name__] = performance
