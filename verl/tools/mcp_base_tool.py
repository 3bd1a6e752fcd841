"""Compatibility with verl: import path of `verl.workers.rollout.tools.mcp_base_tool`."""

import sys

from verl.workers.rollout.tools import mcp_base_tool

sys.modules[__name__] = mcp_base_tool
