"""Compatibility with verl: managers and clients of the rollout servers as verl 0.9 makes them."""

import asyncio
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig

from verl.agents.agent_loop import manager
from verl.agents.agent_loop.server_manager import AsyncLLMServerManager
from verl.config.compose import omega_conf_to_dataclass
from verl.config.rollout import RolloutConfig
from verl.rollout.replica import ServerHandle, one_replica_per_engine


def _create(cls: type, *args: Any, **kwargs: Any) -> Any:
    """`cls(...)`, or a coroutine of it where an event loop runs: its own loop cannot run inside that one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return cls(*args, **kwargs)
    return asyncio.to_thread(cls, *args, **kwargs)


class LLMServerClient(AsyncLLMServerManager):
    """Sends requests to servers, by `load_balancer_handle`: a RequestRouter, its Ray actor, or None for one here."""

    def __init__(
        self, config: DictConfig, load_balancer_handle: Any = None, server_handles: Sequence[ServerHandle] = (),
        worker_group: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(config, list(server_handles), router=load_balancer_handle)
        self.worker_group = worker_group


class LLMServerManager:
    """The servers of the ranks of a worker group; other arguments of verl have no effect."""

    def __init__(self, config: DictConfig, worker_group: Any = None, **kwargs: Any) -> None:
        self.config, self.worker_group = config, worker_group
        rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout, RolloutConfig)
        self.rollout_replicas = one_replica_per_engine(rollout, config.actor_rollout_ref.model, worker_group)

    create = classmethod(_create)

    def get_client(self, client_cls: type[LLMServerClient] | None = None, **kwargs: Any) -> LLMServerClient:
        """A client of all servers; `kwargs` go to its class."""
        cls, handles = client_cls or LLMServerClient, [replica.server_handle for replica in self.rollout_replicas]
        return cls(self.config, server_handles=handles, worker_group=self.worker_group, **kwargs)

    def get_addresses(self) -> list[str]:
        """"host:port" of each server."""
        return [replica.server_address for replica in self.rollout_replicas]

    def get_replicas(self) -> list[Any]:
        """The replicas, one for each engine that serves."""
        return self.rollout_replicas


class AgentLoopManager(manager.AgentLoopManager):
    """verl.agents.agent_loop.AgentLoopManager with verl's `create`."""

    @classmethod
    def create(cls, config: Any, llm_client: LLMServerClient, *args: Any, **kwargs: Any) -> Any:
        """A manager over `llm_client.worker_group`, or in an event loop a coroutine of it; the rest has no effect."""
        return _create(cls, config, llm_client.worker_group)
