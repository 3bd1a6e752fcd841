"""Compatibility with verl: the names of agent loops' base classes, worker and manager, which one module has there."""
# ruff: noqa: F401

from typing import Any

from verl.agents.agent_loop import manager
from verl.agents.agent_loop.base import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    DictConfigWrap,
    ToolListWrap,
)
from verl.agents.agent_loop.registry import _agent_loop_registry, register
from verl.agents.agent_loop.server_manager import AsyncLLMServerManager
from verl.agents.agent_loop.worker import AgentLoopWorker, AgentLoopWorkerBase, get_trajectory_info
from verl.compat.llm_server import LLMServerClient, auto_await
from verl.rollout.replica import TokenOutput


class AgentLoopManager(manager.AgentLoopManager):
    """As verl.agents.agent_loop.AgentLoopManager, also made from a client of the servers."""

    @classmethod
    def create(cls, config: Any, llm_client: LLMServerClient, *args: Any, **kwargs: Any) -> Any:
        """A manager over the ranks of `llm_client`; in an event loop a coroutine of it.

        Further arguments, clients of teachers and handles of reward workers, have no effect: the trainer has both.
        """

        async def made() -> AgentLoopManager:
            return cls(config, llm_client.worker_group)

        return auto_await(made())
