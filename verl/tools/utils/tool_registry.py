"""Compatibility with verl: import path of `verl.workers.rollout.tools.tool_registry`."""

import sys

from verl.workers.rollout.tools import tool_registry

sys.modules[__name__] = tool_registry
