"""Compatibility with verl: import path of `verl.workers.rollout.agent_loop.tool_parser`."""

import sys

from verl.workers.rollout.agent_loop import tool_parser

sys.modules[__name__] = tool_parser
