"""Compatibility with verl: the settings live in `verl.config.engine`."""

from verl.config.engine import *  # noqa: F403
from verl.config.megatron import McoreEngineConfig, VeOmniEngineConfig  # noqa: F401
