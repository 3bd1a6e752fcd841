"""Requests of agent loops to the rollout servers."""

import asyncio
import hashlib
import itertools
from collections import OrderedDict
from typing import Any
from uuid import uuid4

from omegaconf import DictConfig

from verl.agents.rollout_trace import rollout_trace_op
from verl.config.compose import to_settings
from verl.config.rollout import RolloutConfig
from verl.rollout.replica import ServerClient, ServerHandle, TokenOutput
from verl.utils.http_json import ServerUnreachable
from verl.utils.request_router import RequestRouter

# Sampling parameters of a request, by vLLM's names. Loops may also give max_new_tokens, which means max_tokens.
SAMPLING = (
    "temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos",
)  # fmt: skip


class ConversationTooLong(RuntimeError):
    """A conversation's prompt, or all its tokens, leave no room for an answer: the conversation is lost."""


def most_tokens(rollout: RolloutConfig) -> int:
    """The tokens that prompt and response of a conversation may have together."""
    tokens = rollout.prompt_length + rollout.response_length
    return min(tokens, rollout.max_model_len or tokens)


class AsyncLLMServerManager:
    """Sends requests to the rollout servers, for one worker.

    Args:
        config: the trainer's configuration.
        server_handles: the servers.
        max_cache_size: conversations whose number of turns is remembered.
        router: chooses a server; a RequestRouter, or the Ray actor of one, that all workers share.
    """

    def __init__(
        self, config: DictConfig, server_handles: list[ServerHandle], max_cache_size: int = 10000, router: Any = None
    ) -> None:
        self.config = config
        self.rollout_config = to_settings(config.actor_rollout_ref.rollout, RolloutConfig)
        server = self.rollout_config.server
        self.clients = [ServerClient(handle, server.max_connections, server.timeout) for handle in server_handles]
        self.router = RequestRouter(len(server_handles)) if router is None else router
        self.max_cache_size = max_cache_size
        self.turns: OrderedDict[str, int] = OrderedDict()
        self.prompt_tokens = self.cached_tokens = 0
        self.versions: set[int | None] = set()  # of the weights that answered

    @rollout_trace_op
    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any],
        image_data: list[Any] | None = None, video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None, turn: int | None = None, **kwargs: Any,
    ) -> TokenOutput:  # fmt: skip
        """The next turn of the conversation `request_id`, after all its tokens so far.

        `sampling_params`: those of SAMPLING (max_tokens is by default what rollout.prompt_length + response_length, or
        max_model_len, leave); logprobs and kept_tokens (bool: with the ids that top_k and top_p left); and seed, from
        which the seed of each turn is derived with the number of earlier turns, or `turn`.

        A server that fails is left out and the turn starts again on another, up to rollout.server.max_attempts times.
        Raises ValueError for unknown parameters, ConversationTooLong for a prompt of rollout.max_model_len or
        prompt_length + response_length tokens, ServerUnreachable after the last attempt.

        Arguments of loops written for verl, such as `priority` and `mm_processor_kwargs`, have no effect: requests are
        served in the order of their arrival, and consist of token ids.
        """
        if image_data or video_data or audio_data:
            raise ValueError("leave image_data, video_data and audio_data out: rollout servers take token ids only")
        sampling = dict(sampling_params)
        if "max_new_tokens" in sampling:
            given = sampling.pop("max_new_tokens")
            sampling["max_tokens"] = min(given, sampling.get("max_tokens", given))
        log_probs, seed = bool(sampling.pop("logprobs", False)), sampling.pop("seed", None)
        if unknown := sorted(set(sampling) - {*SAMPLING, "kept_tokens"}):
            known = ", ".join([*SAMPLING, "logprobs", "kept_tokens", "seed"])
            raise ValueError(f"sampling_params has {', '.join(unknown)}; known are: {known}")
        most = most_tokens(self.rollout_config)
        room = most - len(prompt_ids)
        if room < 1:
            limit = f"actor_rollout_ref.rollout.prompt_length + response_length, or max_model_len, is {most}: raise it"
            raise ConversationTooLong(f"its {len(prompt_ids)} tokens leave no room for an answer: {limit}")
        sampling["max_tokens"] = max(1, min(sampling.get("max_tokens", room), room))
        earlier = self.turns.pop(request_id, 0)
        self.turns[request_id] = earlier + 1  # as the last entry
        if len(self.turns) > self.max_cache_size:
            self.turns.popitem(last=False)
        if seed is not None:
            sampling["seed"] = turn_seed(seed, earlier if turn is None else turn)
        return await self.send_turn(request_id, prompt_ids, sampling, log_probs)

    async def send_turn(
        self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any], log_probs: bool
    ) -> TokenOutput:
        """The answer of a server to one turn; `sampling` are the parameters of ServerClient.generate."""
        settings = self.rollout_config.server
        for attempt in itertools.count(1):
            server = await self._routed("acquire", request_id)
            is_left_out = False
            try:
                output = await self._ask(server, prompt_ids, sampling, log_probs)
                self.prompt_tokens += len(prompt_ids)
                self.cached_tokens += output.cached_tokens
                self.versions.add(output.weights_version)
                return output
            except ServerUnreachable:
                is_left_out = len(self.clients) > 1
                if attempt == settings.max_attempts:
                    raise
                await asyncio.sleep(0 if is_left_out else settings.retry_delay)
            finally:
                await self._routed("release", server, is_left_out)

    async def _ask(self, server: int, prompt_ids: list[int], sampling: dict[str, Any], log_probs: bool) -> TokenOutput:
        """One request to the server of that number."""
        return await self.clients[server].generate(uuid4().hex, prompt_ids, sampling, log_probs)

    async def _routed(self, method: str, *args: Any) -> Any:
        """The result of a method of the router, which may be a Ray actor; 0 if there is only one server."""
        if len(self.clients) == 1:
            return 0
        function = getattr(self.router, method)
        return await function.remote(*args) if hasattr(function, "remote") else function(*args)

    async def close(self) -> None:
        """Close all connections."""
        for client in self.clients:
            await client.close()


def turn_seed(seed: int, turn: int) -> int:
    """The seed, below 2**56, of a conversation's turn; that of the first turn is the conversation's."""
    return seed if turn == 0 else seed_of(f"{seed}|{turn}".encode())


def seed_of(text: bytes) -> int:
    """The seed, below 2**56, that belongs to a text."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
