"""Agent loops: conversations with tools and interactions, driven by asyncio against rollout servers."""

from verl.agents.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, output_of
from verl.agents.agent_loop.manager import AgentLoopManager
from verl.agents.agent_loop.registry import register
from verl.agents.agent_loop.server_manager import AsyncLLMServerManager
from verl.agents.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.agents.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.agents.agent_loop.worker import AgentLoopWorker
from verl.agents.conversation import Conversation

__all__ = [
    "AgentLoopBase", "AgentLoopManager", "AgentLoopMetrics", "AgentLoopOutput", "AgentLoopWorker",
    "AsyncLLMServerManager", "Conversation", "SingleTurnAgentLoop", "ToolAgentLoop", "output_of", "register",
]  # fmt: skip
