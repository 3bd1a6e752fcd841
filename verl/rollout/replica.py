"""Servers of a rollout, as agent loops see them: where they are, how to start them, how to send a request."""

from __future__ import annotations

import asyncio
import json
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import aiohttp
import ray
from pydantic import BaseModel

from verl.config.model import HFModelConfig
from verl.config.rollout import RolloutConfig
from verl.utils.http_json import HttpClient, ServerUnreachable, ServiceError
from verl.utils.import_utils import load_class_from_fqn, load_extern_object

CLOSE_TIMEOUT_S = 20
START_KEY = "actor_rollout_ref.rollout.server.max_start_wait_time"


class TokenOutput(BaseModel):
    """The answer to one request: token ids [T] and, if requested, the log-prob of each and the ids that top-k and
    top-p left at its position (`kept_tokens`; None where the server does not return them).

    `stop_reason` is "completed", "length" or "aborted"; `weights_version` the global step of the weights.
    `routed_experts` and `num_preempted` are None and `extra_fields` is empty: agent loops written for verl read them.
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    kept_tokens: list[list[int]] | None = None
    routed_experts: Any | None = None
    stop_reason: str | None = None
    weights_version: int | None = None
    cached_tokens: int = 0
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = {}

    def is_cut(self, is_full: bool) -> bool:
        """Whether a limit ended the answer; `is_full`: it leaves no room in the row that holds it."""
        return self.stop_reason == "length" or (is_full and self.stop_reason != "completed")


class RolloutMode(Enum):
    """Where a server runs: in the ranks that train, next to them in the same pool, or in a pool of its own."""

    HYBRID = "hybrid"
    COLOCATED = "colocated"
    STANDALONE = "standalone"


@dataclass(frozen=True)
class ServerHandle:
    """The address ("host:port") of a server, and the token that its requests carry.

    `vocab_size` is set for an engine that crashes on other token ids: then the client refuses them. `sampling_names`
    has pairs of vLLM's name of a sampling parameter and the server's name, where they differ.
    """

    address: str
    token: str = ""
    vocab_size: int | None = None
    sampling_names: tuple[tuple[str, str], ...] = ()


def check_token_ids(ids: Any, vocab_size: int) -> None:
    """ValueError unless `ids` is a list of at least one id from 0 to vocab_size - 1: others crash an engine."""
    if not isinstance(ids, list) or not ids:
        raise ValueError("input_ids must be a list with at least one token id")
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            known = f"0..{vocab_size - 1}"
            raise ValueError(f"input_ids[{position}]={reprlib.repr(token)} is not a token id of the model ({known})")


def host_to_bind() -> str:
    """127.0.0.1, or this node's address in a Ray cluster of several nodes."""
    if ray.is_initialized() and sum(node["Alive"] for node in ray.nodes()) > 1:
        return ray.util.get_node_ip_address()
    return "127.0.0.1"


def token_output(reply: dict[str, Any], log_probs: bool, address: str) -> TokenOutput:
    """The answer in a reply to POST /generate. ServerUnreachable for a number of values that cannot be right."""
    meta, ids = reply["meta_info"], reply["output_ids"]
    kind = (meta.get("finish_reason") or {}).get("type", "stop")
    values = [entry[0] for entry in meta["output_token_logprobs"]] if log_probs else None
    kept = meta.get("output_kept_tokens")
    for what, given in (("log-probs", values), ("sets of kept tokens", kept)):
        if given is not None and len(given) != len(ids):
            raise ServerUnreachable(f"{address} gave {len(given)} {what} for {len(ids)} tokens")
    version = str(meta.get("weight_version", ""))
    return TokenOutput(
        token_ids=ids, log_probs=values, kept_tokens=kept, cached_tokens=meta.get("cached_tokens") or 0,
        stop_reason={"stop": "completed", "abort": "aborted"}.get(kind, kind),
        weights_version=int(version) if version.isdigit() else None,
    )  # fmt: skip


class ServerClient(HttpClient):
    """Requests to one server, in the form of SGLang's native API; all from one event loop."""

    def __init__(self, handle: ServerHandle, max_connections: int = 1000, timeout: float = 60.0) -> None:
        super().__init__(handle.token, max_connections, connect_timeout=timeout)
        self.handle = handle

    async def post(self, path: str, body: dict[str, Any], timeout: float | None = None) -> Any:
        """The answer of POST /path: decoded JSON, text, or None if it is empty.

        Raises ServiceError if the server refuses the request, ServerUnreachable if it fails or does not answer.
        """
        url = f"http://{self.handle.address}/{path}"
        try:
            reply = await self.send("POST", url, json.dumps(body).encode(), timeout=timeout)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerUnreachable(f"{url}: {type(error).__name__}: {error}") from error
        if reply.status >= 500:
            raise ServerUnreachable(f"{url} answered {reply.status}: {reply.text[:500]}")
        if reply.status >= 400:
            raise ServiceError(f"{url} answered {reply.status}: {reply.text}", reply.status)
        is_json = reply.content and reply.content_type == "application/json"
        return json.loads(reply.content) if is_json else reply.text or None

    async def generate(self, rid: str, input_ids: list[int], sampling: dict[str, Any], log_probs: bool) -> TokenOutput:
        """The answer to one prompt, which may take as long as it needs. ValueError for ids outside the vocabulary.

        `sampling` has vLLM's names: temperature, top_p, top_k, repetition_penalty, max_tokens, min_tokens, seed,
        stop_token_ids, ignore_eos; and kept_tokens, whether they are requested.
        """
        if self.handle.vocab_size is not None:
            check_token_ids(input_ids, self.handle.vocab_size)
        names = dict(self.handle.sampling_names)
        params = {names.get(name, name): value for name, value in sampling.items() if name != "kept_tokens"}
        body = {"rid": rid, "input_ids": input_ids, "sampling_params": params, "return_logprob": log_probs}
        if sampling.get("kept_tokens"):
            body["return_kept_tokens"] = True
        output = token_output(await self.post("generate", body), log_probs, self.handle.address)
        stops = () if sampling.get("ignore_eos") else sampling.get("stop_token_ids") or ()
        if output.stop_reason == "length" and output.token_ids and output.token_ids[-1] in stops:
            return output.model_copy(update={"stop_reason": "completed"})  # some engines look at the limit first
        return output


class RolloutReplica:
    """Engine number `replica_rank` of the rollout: its ranks, and its server after one of the `init_*` methods."""

    def __init__(
        self, replica_rank: int, config: RolloutConfig, model_config: HFModelConfig, gpus_per_node: int = 8,
        is_reward_model: bool = False,
    ) -> None:  # fmt: skip
        self.replica_rank, self.config, self.model_config = replica_rank, config, model_config
        self.gpus_per_node, self.is_reward_model = gpus_per_node, is_reward_model
        self.rollout_mode: RolloutMode | None = None
        self.servers: list[ServerHandle] = []
        self.worker_group: Any = None
        self.pool: Any = None  # of its own

    @property
    def world_size(self) -> int:
        """Ranks of the engine."""
        return self.config.tensor_model_parallel_size

    async def init_hybrid(self, worker_group: Any) -> None:
        """Serve from the ranks that train: the engines of `worker_group`'s rollout."""
        self.rollout_mode, self.worker_group = RolloutMode.HYBRID, worker_group
        self._take_server(self.replica_rank * self.world_size)

    async def init_colocated(self, resource_pool: Any) -> None:
        """Start ranks of its own, with the model's weights, in a pool of `world_size` ranks that others use too.

        A RayResourcePool (of which `split_resource_pool` gives parts), or a ResourcePool of one rank for this process.
        """
        if resource_pool.world_size != self.world_size:
            raise ValueError(
                f"the pool has {resource_pool.world_size} ranks, but an engine of this rollout runs on "
                f"{self.world_size}; pass a part of the pool (split_resource_pool)."
            )
        self.rollout_mode = RolloutMode.COLOCATED
        await asyncio.to_thread(self._start_ranks, resource_pool)
        await self.launch_servers()

    async def init_standalone(self, use_gpu: bool | None = None) -> None:
        """Start ranks of its own, with the model's weights, in a new pool: GPUs (None: if Ray has some), else CPUs."""
        from verl.single_controller.ray import RayResourcePool

        per_node = min(self.world_size, self.gpus_per_node)
        nodes = [per_node] * -(-self.world_size // per_node)
        use_gpu = ray.cluster_resources().get("GPU", 0) > 0 if use_gpu is None else use_gpu
        self.pool = RayResourcePool(nodes, use_gpu=use_gpu, max_colocate_count=1)
        self.rollout_mode = RolloutMode.STANDALONE
        await asyncio.to_thread(self._start_ranks, self.pool)
        await self.launch_servers()

    def get_ray_class_with_init_args(self) -> Any:
        """The class of its own ranks, with their arguments."""
        from verl.rollout.replica_worker import RolloutReplicaWorker
        from verl.single_controller.ray import RayClassWithInitArgs

        arguments = {"config": self.config, "model_config": self.model_config}
        return RayClassWithInitArgs(ray.remote(RolloutReplicaWorker), **arguments)

    def _start_ranks(self, pool: Any) -> None:
        from verl.single_controller.local import LocalWorkerGroup
        from verl.single_controller.ray import RayResourcePool, RayWorkerGroup

        on_ray = isinstance(pool, RayResourcePool)
        device = "cuda" if on_ray and pool.use_gpu else "cpu"
        part = self.get_ray_class_with_init_args()
        part.kwargs["device_name"] = device
        group_class = RayWorkerGroup if on_ray else LocalWorkerGroup
        limits = {"init": self.config.server.max_start_wait_time}
        self.worker_group = group_class(pool, part, device_name=device, time_limits=limits)

    async def launch_servers(self) -> None:
        """Start the server of its own ranks, within rollout.server.max_start_wait_time."""
        await asyncio.to_thread(self.worker_group.init_model)
        self._take_server(0)

    def _take_server(self, rank: int) -> None:
        handle = self.worker_group.rollout_server()[rank]
        if handle is None:
            raise ValueError("actor_rollout_ref.rollout.mode=async, but the rollout has no server_handle; use sync")
        self.servers = [handle]

    async def close(self) -> None:
        """End ranks of its own with their server, and give back a pool of its own; nothing for those of a training."""
        if self.rollout_mode is RolloutMode.HYBRID:
            return
        if self.worker_group is not None:
            await asyncio.to_thread(self.worker_group.try_execute_all, "close_rollout", CLOSE_TIMEOUT_S)
            self.worker_group.shutdown()
        if self.pool is not None:
            self.pool.release()

    @property
    def workers(self) -> list[Any]:
        """The engine's ranks."""
        ranks = [] if self.worker_group is None else self.worker_group.workers
        first = self.replica_rank * self.world_size if self.rollout_mode is RolloutMode.HYBRID else 0
        return ranks[first : first + self.world_size]

    @property
    def server_handle(self) -> ServerHandle:
        """The server that takes the requests."""
        return self.servers[0]

    @property
    def server_address(self) -> str:
        """Its address, "host:port"."""
        return self.server_handle.address

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with ServerClient(self.server_handle, timeout=self.config.server.timeout) as client:
            return await client.post(path, body, self.config.server.timeout)

    async def wake_up(self) -> None:
        """Bring the engine's weights, in a training the actor's newest, and cache back into memory."""
        await asyncio.to_thread(self.worker_group.rollout_mode)

    async def sleep(self) -> None:
        """Free the memory of the engine's weights and cache."""
        await asyncio.to_thread(self.worker_group.trainer_mode)

    async def clear_kv_cache(self) -> None:
        """Forget cached prefixes."""
        await self._post("flush_cache", {})

    async def abort_all_requests(self) -> Any:
        """Finish all requests with what they have generated."""
        return await self._post("abort_request", {"abort_all": True})

    async def abort_request(self, request_id: str) -> Any:
        """Finish one request with what it has generated."""
        return await self._post("abort_request", {"rid": request_id})


class RolloutReplicaRegistry:
    """Replica classes by `rollout.name`; each is imported when it is requested."""

    _loaders: dict[str, Callable[[], type[RolloutReplica]]] = {
        "sglang": partial(load_class_from_fqn, "verl.rollout.sglang_rollout.async_sglang_server.SGLangReplica"),
        "vllm": partial(load_class_from_fqn, "verl.rollout.vllm_rollout.vllm_async_server.vLLMReplica"),
    }

    @classmethod
    def register(cls, name: str, loader: Callable[[], type[RolloutReplica]]) -> None:
        """Enter a function that returns the class."""
        cls._loaders[name] = loader

    @classmethod
    def serves(cls, config: Any) -> bool:
        """Whether a rollout section asks for agent loops (mode=async) and its rollout has a server."""
        known = config.agent.custom_async_server.path is not None or config.name in cls._loaders
        return config.mode == "async" and known

    @classmethod
    def of(cls, config: RolloutConfig) -> type[RolloutReplica]:
        """The class of a rollout section: that of agent.custom_async_server, else of the rollout's name."""
        custom = config.agent.custom_async_server
        if custom.path is None:
            return cls.get(config.name)
        replica = load_extern_object(custom.path, custom.name)
        if not (isinstance(replica, type) and issubclass(replica, RolloutReplica)):
            key = "actor_rollout_ref.rollout.agent.custom_async_server"
            raise TypeError(
                f"{key}.name={custom.name!r} in {custom.path} is {replica!r}; a subclass of "
                "verl.rollout.replica.RolloutReplica is needed."
            )
        return replica

    @classmethod
    def get(cls, name: str) -> type[RolloutReplica]:
        """The class of that name; ValueError for an unknown one."""
        if name not in cls._loaders:
            known = ", ".join(sorted(cls._loaders))
            raise ValueError(
                f"actor_rollout_ref.rollout.name={name!r} has no server for rollout.mode=async. Known: {known}."
            )
        return cls._loaders[name]()


def get_rollout_replica_class(rollout: str) -> type[RolloutReplica]:
    """The replica class of a rollout's name."""
    return RolloutReplicaRegistry.get(rollout)


def one_replica_per_engine(config: RolloutConfig, model_config: Any, worker_group: Any) -> list[RolloutReplica]:
    """The replicas of a worker group's engines, ready for requests."""
    replica_class = RolloutReplicaRegistry.of(config)
    size = replica_class(0, config, model_config).world_size
    replicas = [replica_class(i, config, model_config) for i in range(worker_group.world_size // size)]
    for replica in replicas:
        asyncio.run(replica.init_hybrid(worker_group))
    return replicas
