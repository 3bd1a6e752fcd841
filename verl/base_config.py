"""Compatibility with verl: import path of `verl.config.base`."""

import sys

from verl.config import base

sys.modules[__name__] = base
