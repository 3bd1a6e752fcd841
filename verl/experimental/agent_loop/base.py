"""Compatibility with verl: former import path of `verl.workers.rollout.agent_loop.base` and of `stop_ids`."""
# ruff: noqa: F401

from verl.utils.tokenizer import stop_ids
from verl.workers.rollout.agent_loop.base import AgentLoopBase, AgentLoopOutput
