"""Compatibility with verl: import path of `verl.checkpoint.fsdp_checkpoint_manager`."""

import sys

from verl.checkpoint import fsdp_checkpoint_manager

sys.modules[__name__] = fsdp_checkpoint_manager
