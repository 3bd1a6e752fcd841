"""Compatibility with verl: import path of `verl.checkpoint`."""

from verl.checkpoint import *  # noqa: F403
from verl.utils.checkpoint.checkpoint_manager import *  # noqa: F403
