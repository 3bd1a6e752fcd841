"""Compatibility with verl: the settings live in `verl.config.critic`."""

from verl.config.critic import *  # noqa: F403
from verl.config.megatron import McoreCriticConfig  # noqa: F401
