"""Compatibility with verl: import path of `verl.workers.rollout.agent_loop.tool_agent_loop`."""

import sys

from verl.workers.rollout.agent_loop import tool_agent_loop

sys.modules[__name__] = tool_agent_loop
