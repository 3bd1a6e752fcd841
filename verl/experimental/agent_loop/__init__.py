"""Agent loops: conversations with tools and interactions, driven by asyncio against rollout servers."""

from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopManager,
    AgentLoopWorker,
    AsyncLLMServerManager,
)
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

__all__ = [
    "AgentLoopBase", "AgentLoopManager", "AgentLoopWorker", "AsyncLLMServerManager", "SingleTurnAgentLoop",
    "ToolAgentLoop",
]  # fmt: skip
