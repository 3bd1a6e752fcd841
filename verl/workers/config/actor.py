"""Compatibility with verl: the settings live in `verl.config.actor`."""

from verl.config.actor import *  # noqa: F403
from verl.config.megatron import McoreActorConfig  # noqa: F401
