"""Compatibility with verl: import path of `verl.profiling.profile`."""

import sys

from verl.profiling import profile

sys.modules[__name__] = profile
