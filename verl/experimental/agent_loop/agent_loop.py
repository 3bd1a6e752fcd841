"""Compatibility with verl: the names of agent loops' base classes, worker and manager, which one module has there."""
# ruff: noqa: F401

from verl.workers.rollout.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, DictConfigWrap
from verl.workers.rollout.agent_loop.manager import AgentLoopManager
from verl.workers.rollout.agent_loop.registry import _agent_loop_registry, register
from verl.workers.rollout.agent_loop.server_manager import AsyncLLMServerManager
from verl.workers.rollout.agent_loop.worker import AgentLoopWorker, AgentLoopWorkerBase, get_trajectory_info
from verl.workers.rollout.replica import TokenOutput
