"""Compatibility with verl: import path of `verl.workers.rollout.tools.mcp_base_tool`."""

from verl.workers.rollout.tools.mcp_base_tool import *  # noqa: F403
