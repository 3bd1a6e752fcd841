"""Compatibility with verl: import path of `verl.workers.rollout.agent_loop.single_turn_agent_loop`."""

import sys

from verl.workers.rollout.agent_loop import single_turn_agent_loop

sys.modules[__name__] = single_turn_agent_loop
