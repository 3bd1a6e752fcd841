"""Compatibility with verl: import path of `verl.workers.rollout.agent_loop`."""
# ruff: noqa: F401

from verl.workers.rollout.agent_loop import (
    AgentLoopBase,
    AgentLoopManager,
    AgentLoopWorker,
    AsyncLLMServerManager,
    SingleTurnAgentLoop,
    ToolAgentLoop,
)
