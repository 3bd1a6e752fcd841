"""Compatibility with verl: import path of `verl.reward.managers.registry`."""

import sys

from verl.reward.managers import registry

sys.modules[__name__] = registry
