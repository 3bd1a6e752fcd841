"""Generates with an SGLang server, which takes the actor's weights before every step."""

from __future__ import annotations

import asyncio
import base64
import io
import platform
import time
import uuid
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch.distributed.device_mesh import DeviceMesh

from verl.config.model import HFModelConfig
from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto
from verl.rollout.base import KEY, BaseRollout, engine_group
from verl.rollout.replica import ServerClient, ServerHandle, TokenOutput, host_to_bind
from verl.rollout.sampling import GenerationRequest, build_rollout_batch, right_padded
from verl.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer
from verl.training.parallel.sharding import buckets
from verl.utils.accelerator import visible_device
from verl.utils.http_json import ServerUnreachable, ServiceError
from verl.utils.tokenizer import stop_ids


class ServerAdapter(BaseRollout):
    """One SGLang server for each `tensor_model_parallel_size` neighbouring ranks, started by the first of them.

    All of them call each method together. `release` frees the server's weights and cache on a GPU; on a CPU SGLang
    takes the call and frees nothing. Log-probs are those of the distribution after temperature, before top-k and top-p.
    SGLang draws from its own random state: a seed repeats nothing, unless engine_kwargs.sglang turns
    enable_deterministic_inference on, which needs a GPU.
    """

    server_class = SGLangHttpServer

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig, device_mesh: DeviceMesh | None) -> None:
        super().__init__(config, model_config, device_mesh)
        on_cuda = device_mesh is not None and device_mesh.device_type == "cuda"
        if config.stop_token_ids is not None and not config.ignore_eos:
            own = stop_ids(model_config.tokenizer, model_config.local_path)
            if missing := sorted(set(own) - set(config.stop_token_ids)):
                raise ValueError(
                    f"{KEY}.stop_token_ids={list(config.stop_token_ids)} lacks {missing}: SGLang ends "
                    f"answers at every end token of the model. Add them, or set {KEY}.name=vllm."
                )
        self.size = config.tensor_model_parallel_size
        self.group = engine_group(self.size)
        self.leads = self.group is None or dist.get_rank(self.group) == 0
        self.sleeps = config.enable_sleep_mode and config.free_cache_engine
        self.keeps_weights = not (self.sleeps and on_cuda)
        if self.sleeps and not on_cuda:
            logger.info("SGLang frees no memory on a CPU: its weights and cache stay there while the actor trains")
        nodes, gpus = zip(*self._all_gather((platform.node(), visible_device() if on_cuda else None)), strict=True)
        if len(set(nodes)) > 1:
            raise ValueError(
                f"{KEY}.tensor_model_parallel_size={self.size} puts ranks of the nodes {', '.join(sorted(set(nodes)))} "
                "into one engine, but an SGLang server runs on one node. Use a size that divides the ranks of a node."
            )
        devices = list(gpus) if on_cuda else None
        self.server = self.server_class(config, model_config, devices, host_to_bind()) if self.leads else None
        self.server_handle: ServerHandle = self._all_gather(self.server and self.server.launch_server())[0]
        self.released: set[str] = set()
        self.has_weights = config.load_format != "dummy"
        asyncio.run(self.release())

    def _all_gather(self, value: Any) -> list[Any]:
        """The value of each rank of the engine."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _client(self) -> ServerClient:
        server = self.config.server
        return ServerClient(self.server_handle, server.max_connections, server.timeout)

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        try:
            async with self._client() as client:
                await client.post(path, body)
        except ServerUnreachable:
            if self.server is not None:
                self.server.seconds_up()  # raises, with its log, if it has ended
            raise

    def bind_actor(self, engine: Any, policy: Any) -> None:
        self.has_weights = False  # the actor's are what counts from now on

    async def resume(self, tags: list[str]) -> None:
        # SGLang crashes when it is asked to resume memory that was not released.
        again = [tag for tag in tags if tag in self.released]
        self.released -= set(again)
        if self.leads:
            if again:
                await self._post("resume_memory_occupation", {"tags": again})
            if "kv_cache" in tags:
                await self._post("flush_cache", {})  # the cache was computed by the weights before
                version = {"new_version": str(self.weights_version), "abort_all_requests": False}
                await self._post("update_weight_version", version)
        self._all_gather(None)

    async def release(self) -> None:
        tags = [tag for tag in ("kv_cache", "weights") if self.sleeps and tag not in self.released]
        if not tags:
            return
        self.released |= set(tags)
        self.has_weights &= self.keeps_weights
        if self.leads:
            await self._post("abort_request", {"abort_all": True})
            await self._flush_when_idle()
            await self._post("release_memory_occupation", {"tags": tags})
        self._all_gather(None)

    async def _flush_when_idle(self) -> None:
        """Flush the cache, which a server refuses while it runs requests; releasing memory then would crash it."""
        deadline = time.monotonic() + self.config.server.timeout
        while True:
            try:
                return await self._post("flush_cache", {})
            except ServiceError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], **kwargs: Any) -> None:
        """Send the weights in parts of `update_weights_bucket_megabytes`; the server waits for requests that run."""
        self.has_weights = False
        in_session = self.leads and await self._begin_update()
        for part in buckets(weights, self.config.update_weights_bucket_megabytes << 20):
            if self.leads:
                tensors = pack_tensors(part)
                blobs = [serialize_tensors(tensors) for _ in range(self.size)]
                body = {"serialized_named_tensors": blobs, "flush_cache": False}
                await self._post("update_weights_from_tensor", body)
        if in_session:
            await self._post("end_weight_update", {})
        self._all_gather(None)
        self.has_weights = True

    async def read_weights(self, path: str) -> None:
        """Let the server take the weights of a model folder."""
        if self.leads:
            await self._post("update_weights_from_disk", {"model_path": path})
        self._all_gather(None)
        self.has_weights = True

    async def _begin_update(self) -> bool:
        """Open a session of weight updates; False for an older server, which has none and needs none."""
        try:
            await self._post("begin_weight_update", {})
        except ServiceError as error:
            if error.status != 404:
                raise
            return False
        return True

    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        if not self.has_weights:
            raise RuntimeError(
                "SGLang was not given the actor's weights since it started or slept; call update_weights before "
                "generate_sequences."
            )
        request = GenerationRequest.from_batch(prompts, self.config)
        limit, params = request.limit, request.sampling.parameters()
        params |= {"max_tokens": limit, "repetition_penalty": request.repetition_penalty}
        params |= {"stop_token_ids": list(request.eos_ids), "ignore_eos": self.config.ignore_eos}
        async with self._client() as client:
            requests = [
                self._generate(client, ids, params | {"seed": seeds[0] + k}, request.log_probs)
                for ids, seeds in zip(request.prompt_ids, request.seeds, strict=True)
                for k in range(request.n)
            ]
            rows = await asyncio.gather(*requests)
        responses = right_padded([row.token_ids for row in rows], limit, request.pad_id, torch.int64)
        mask = right_padded([[1] * len(row.token_ids) for row in rows], limit, 0, torch.int64)
        log_probs = None
        if request.log_probs:
            log_probs = right_padded([row.log_probs for row in rows], limit, 0.0, torch.float32)
        return DataProto.from_dict(build_rollout_batch(prompts, request.n, responses, mask, log_probs))

    async def _generate(
        self, client: ServerClient, ids: list[int], params: dict[str, Any], log_probs: bool
    ) -> TokenOutput:
        """The answer to one prompt, requested rollout.server.max_attempts times at most."""
        for attempts_left in reversed(range(self.config.server.max_attempts)):
            try:
                return await client.generate(uuid.uuid4().hex, ids, params, log_probs)
            except ServerUnreachable:
                if self.server is not None:
                    self.server.seconds_up()  # raises, with its log, if it has ended
                if not attempts_left:
                    raise
                await asyncio.sleep(self.config.server.retry_delay)

    def close(self) -> None:
        if self.server is not None:
            self.server.stop()


def pack_tensors(tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Copies of tensors, all in one buffer: it is shared with the server as one segment of memory."""
    sizes = [-(-tensor.nbytes // 16) * 16 for _, tensor in tensors]  # aligned for every dtype
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0][1].device)
    copies, start = [], 0
    for (name, tensor), size in zip(tensors, sizes, strict=True):
        copy = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append((name, copy.copy_(tensor.detach())))
        start += size
    return copies


def serialize_tensors(tensors: list[tuple[str, torch.Tensor]]) -> str:
    """Base64 of pickled (name, tensor) whose tensors stay where they are, for a process of this machine to map.

    They must be kept until the server has answered.
    """
    if tensors[0][1].is_cuda:
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()  # devices by UUID: the server numbers them in another way
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")  # descriptors pass only between related processes
    try:
        data = io.BytesIO()
        ForkingPickler(data).dump(tensors)
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    return base64.b64encode(data.getvalue()).decode()
