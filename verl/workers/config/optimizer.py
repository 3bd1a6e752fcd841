"""Compatibility with verl: the settings live in `verl.config.optimizer`."""

from verl.config.megatron import McoreOptimizerConfig, VeOmniOptimizerConfig  # noqa: F401
from verl.config.optimizer import *  # noqa: F403
