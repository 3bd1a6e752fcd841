"""Compatibility with verl: import path of `verl.workers.rollout.tools.mcp_search_tool`."""

import sys

from verl.workers.rollout.tools import mcp_search_tool

sys.modules[__name__] = mcp_search_tool
