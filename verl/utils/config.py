"""Compatibility with verl: import path of `verl.config.compose`."""

import sys

from verl.config import compose

sys.modules[__name__] = compose
