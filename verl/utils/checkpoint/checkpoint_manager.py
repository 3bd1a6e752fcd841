"""Compatibility with verl: import path of `verl.checkpoint.checkpoint_manager`."""

import sys

from verl.checkpoint import checkpoint_manager

sys.modules[__name__] = checkpoint_manager
