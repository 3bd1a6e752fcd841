"""The interface of an agent loop, the table of loops, and requests to the rollout servers."""

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any
from uuid import uuid4

from omegaconf import DictConfig
from pydantic import BaseModel, Field

from verl.config.compose import omega_conf_to_dataclass
from verl.config.rollout import RolloutConfig
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.rollout_trace import rollout_trace_op
from verl.utils.tokenizer import stop_ids
from verl.workers.rollout.message_encoder import MessageEncoder
from verl.workers.rollout.replica import (
    RequestRouter,
    ServerClient,
    ServerHandle,
    ServerUnreachable,
    TokenOutput,
)

# Sampling parameters as loops give them, by their name in a request.
SAMPLING = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens", "max_new_tokens": "max_new_tokens", "min_tokens": "min_new_tokens",
    "stop_token_ids": "stop_token_ids", "ignore_eos": "ignore_eos",
}  # fmt: skip


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
        self.rollout_config: RolloutConfig = omega_conf_to_dataclass(config.actor_rollout_ref.rollout, RolloutConfig)
        server = self.rollout_config.server
        self.clients = [ServerClient(handle, server.max_connections, server.timeout) for handle in server_handles]
        self.router = RequestRouter(len(server_handles)) if router is None else router
        self.max_cache_size = max_cache_size
        self.turns: OrderedDict[str, int] = OrderedDict()
        self.prompt_tokens = self.cached_tokens = 0

    @rollout_trace_op
    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any],
        image_data: list[Any] | None = None, video_data: list[Any] | None = None,
    ) -> TokenOutput:  # fmt: skip
        """The next turn of the conversation `request_id`, after all its tokens so far.

        `sampling_params`: temperature, top_p, top_k, repetition_penalty, ignore_eos, stop_token_ids, max_tokens (by
        default what rollout.prompt_length + response_length, or max_model_len, leave), logprobs (bool) and seed, from
        which the seed of each turn is derived. A server that fails is left out and the turn starts again on another, up
        to rollout.server.max_attempts times. Raises ValueError for unknown parameters, ConversationTooLong for a prompt
        of rollout.max_model_len or prompt_length + response_length tokens, ServerUnreachable at the end.
        """
        if image_data or video_data:
            raise ValueError("image_data and video_data: rollout servers take token ids only")
        given = dict(sampling_params)
        log_probs, seed = bool(given.pop("logprobs", False)), given.pop("seed", None)
        if unknown := sorted(set(given) - set(SAMPLING)):
            known = ", ".join([*SAMPLING, "logprobs", "seed"])
            raise ValueError(f"sampling_params has {', '.join(unknown)}; known are: {known}")
        sampling = {SAMPLING[name]: value for name, value in given.items()}
        rollout = self.rollout_config
        room = most_tokens(rollout) - len(prompt_ids)
        if room < 1:
            limit = f"rollout.prompt_length + response_length, or max_model_len, is {most_tokens(rollout)}"
            raise ConversationTooLong(f"its {len(prompt_ids)} tokens leave no room for an answer: {limit}")
        sampling["max_new_tokens"] = max(1, min(sampling.get("max_new_tokens", room), room))
        turn = self.turns.pop(request_id, 0)
        self.turns[request_id] = turn + 1
        if len(self.turns) > self.max_cache_size:
            self.turns.popitem(last=False)
        if seed is not None:
            sampling["sampling_seed"] = turn_seed(seed, turn)
        for attempt in range(1, rollout.server.max_attempts + 1):
            server, lost = await self._routed("acquire", request_id), False
            try:
                output = await self.clients[server].generate(uuid4().hex, prompt_ids, sampling, log_probs)
                self.prompt_tokens += len(prompt_ids)
                self.cached_tokens += output.cached_tokens
                return output
            except ServerUnreachable:
                lost = len(self.clients) > 1
                if attempt == rollout.server.max_attempts:
                    raise
                await asyncio.sleep(0 if lost else rollout.server.retry_delay)
            finally:
                await self._routed("release", server, lost)
        raise AssertionError

    async def _routed(self, method: str, *args: Any) -> Any:
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
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}|{turn}".encode(), digest_size=7).digest(), "big")


class AgentLoopMetrics(BaseModel):
    """Seconds that a conversation spent in generation and in tool calls, summed over its turns."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0


class AgentLoopOutput(BaseModel):
    """A finished conversation: ids, mask (1 = generated), log-probs of the response; a score if it is known already.

    With a `reward_score` from every conversation of a batch, no reward function is called.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any | None = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = Field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = {}


class DictConfigWrap:
    """Holds a config, so that hydra's `instantiate` passes it on as it is."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config


class AgentLoopBase(ABC):
    """Drives one conversation. An object is made for each; `run` gets the row's columns as keyword arguments.

    Attributes: config (the trainer's), server_manager, tokenizer, processor, rollout_config,
    encoder (a MessageEncoder), apply_chat_template_kwargs.
    """

    def __init__(
        self, trainer_config: DictConfigWrap, server_manager: AsyncLLMServerManager, tokenizer: Any, processor: Any,
        dataset_cls: type | None = None, dataset_config: DictConfig | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.trainer_config, self.config = trainer_config, trainer_config.config
        self.server_manager, self.tokenizer, self.processor = server_manager, tokenizer, processor
        self.dataset_cls, self.dataset_config = dataset_cls, dataset_config
        self.rollout_config = server_manager.rollout_config
        self.apply_chat_template_kwargs = dict(self.config.data.get("apply_chat_template_kwargs") or {})
        model, rollout = self.config.actor_rollout_ref.model.path, self.rollout_config
        ends = stop_ids(tokenizer, model, rollout.stop_token_ids)
        self.encoder = MessageEncoder(tokenizer, ends, **self.apply_chat_template_kwargs)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the conversations of this process share."""
        return asyncio.get_running_loop()

    async def process_vision_info(self, messages: list[dict]) -> dict:
        """The images and videos of messages; {} since rollout servers take token ids only."""
        return {}

    async def apply_chat_template(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, images: Any = None,
        videos: Any = None, remove_system_prompt: bool = False,
    ) -> list[int]:  # fmt: skip
        """The ids of a prompt; with `remove_system_prompt` those of messages that continue a conversation."""
        if remove_system_prompt:
            return self.encoder.added(messages, tools)
        return self.encoder.prompt(messages, tools)

    def check_prompt(self, ids: list[int]) -> list[int]:
        """The ids of a first prompt; ConversationTooLong if rollout.prompt_length is less: no row can hold them."""
        limit = self.rollout_config.prompt_length
        if len(ids) > limit:
            raise ConversationTooLong(f"its prompt has {len(ids)} tokens, more than rollout.prompt_length={limit}")
        return ids

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run one conversation."""


# Loops by name: hydra's {_target_, arguments}.
_agent_loop_registry: dict[str, dict[str, Any]] = {
    "single_turn_agent": {"_target_": "verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop"},
    "tool_agent": {"_target_": "verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop"},
}


def register(agent_name: str) -> Any:
    """Decorator that registers a subclass of AgentLoopBase under a name."""

    def decorator(subclass: type[AgentLoopBase]) -> type[AgentLoopBase]:
        _agent_loop_registry[agent_name] = {"_target_": f"{subclass.__module__}.{subclass.__qualname__}"}
        return subclass

    return decorator


def make_agent_loop(name: str, **arguments: Any) -> AgentLoopBase:
    """A new instance of the loop registered under this name. Raises ValueError if there is none."""
    if name not in _agent_loop_registry:
        raise ValueError(
            f"agent_name={name!r} is unknown. Known: {', '.join(sorted(_agent_loop_registry))}. Register your own with "
            "verl.experimental.agent_loop.agent_loop.register, or in the file rollout.agent.agent_loop_config_path."
        )
    settings = dict(_agent_loop_registry[name])
    cls = load_class_from_fqn(settings.pop("_target_"), f"agent loop {name!r}")
    return cls(**settings, **arguments)
