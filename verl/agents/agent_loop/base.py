"""The interface of an agent loop."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

from omegaconf import DictConfig
from pydantic import BaseModel, Field

from verl.agents.agent_loop.server_manager import AsyncLLMServerManager, ConversationTooLong, most_tokens
from verl.agents.conversation import Conversation
from verl.agents.message_encoder import MessageEncoder
from verl.rollout.replica import TokenOutput
from verl.utils.tokenizer import stop_ids


class AgentLoopMetrics(BaseModel):
    """Seconds that a conversation spent in generation and in tool calls, summed over its turns."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0


class AgentLoopOutput(BaseModel):
    """A finished conversation: ids, mask (1 = generated), log-probs of the response; a score if it is known already.

    kept_tokens has the ids that top-k and top-p left at each token of the response, [] at tokens that were given: with
    sampling_params["kept_tokens"], servers return them (TokenOutput.kept_tokens), and ratios are biased without them.

    With a `reward_score` from every conversation of a batch, no reward function is called. `routed_experts` and
    `multi_modal_data` are accepted from loops that were written for verl, and not used.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    kept_tokens: list[list[int]] | None = None
    routed_experts: Any | None = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = Field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = {}


def output_of(
    conversation: Conversation, num_turns: int, metrics: AgentLoopMetrics | None = None, **fields: Any
) -> AgentLoopOutput:
    """The output of a conversation that has ended; `fields` are its extra fields, such as end_reason="stop"."""
    return AgentLoopOutput(
        prompt_ids=conversation.prompt_ids, response_ids=conversation.response_ids,
        response_mask=conversation.response_mask, response_logprobs=conversation.response_logprobs,
        kept_tokens=conversation.kept_tokens, num_turns=num_turns, metrics=metrics or AgentLoopMetrics(),
        extra_fields={**fields, "weights_versions": [version for version, _, _ in conversation.versions]},
    )  # fmt: skip


class DictConfigWrap:
    """The trainer's configuration, as the loops of one worker get it.

    `shared` has objects that loops of a kind create once for all conversations of the worker, by a name of their own.
    """

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        self.shared: dict[str, Any] = {}


class ToolListWrap:
    """The tools of a worker's loops; a function that makes them is called when they are first asked for."""

    def __init__(self, tools: list | Callable[[], list]) -> None:
        self._tools = tools

    @cached_property
    def tools(self) -> list:
        return self._tools() if callable(self._tools) else self._tools


class AgentLoopBase(ABC):
    """Drives one conversation. An object is made for each; `run` gets the row's columns as keyword arguments.

    Attributes: config (the trainer's), server_manager, tokenizer, processor, rollout_config, data_config (its section
    data, also dataset_config), encoder (a MessageEncoder), apply_chat_template_kwargs, tools (a ToolListWrap of what
    rollout.multi_turn configures), hf_model_type (model_type of the model's config.json).
    """

    def __init__(
        self, trainer_config: DictConfigWrap, server_manager: AsyncLLMServerManager, tokenizer: Any, processor: Any,
        dataset_cls: type | None = None, dataset_config: DictConfig | None = None, data_config: Any = None,
        tools: Any = None, hf_model_type: str | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.trainer_config, self.config = trainer_config, trainer_config.config
        self.server_manager, self.tokenizer, self.processor = server_manager, tokenizer, processor
        self.dataset_cls, self.tools, self.hf_model_type = dataset_cls, tools, hf_model_type
        if isinstance(data_config, DictConfigWrap):
            data_config = data_config.config
        self.data_config = self.dataset_config = dataset_config if data_config is None else data_config
        self.rollout_config = server_manager.rollout_config
        self.apply_chat_template_kwargs = dict(self.config.data.get("apply_chat_template_kwargs") or {})
        ends = stop_ids(tokenizer, self.config.actor_rollout_ref.model.path, self.rollout_config.stop_token_ids)
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
            return self.encoder.encode_appended(messages, tools)
        return self.encoder.prompt(messages, tools)

    def check_prompt(self, ids: list[int]) -> list[int]:
        """The ids of a first prompt; ConversationTooLong if rollout.prompt_length is less: no row can hold them."""
        limit = self.rollout_config.prompt_length
        if len(ids) > limit:
            raise ConversationTooLong(f"its {len(ids)} tokens exceed actor_rollout_ref.rollout.prompt_length={limit}")
        return ids

    async def generate_turn(
        self, request_id: str, conversation: Conversation, sampling_params: dict[str, Any],
        prompt_ids: list[int] | None = None, stops: Collection[int] = (),
    ) -> tuple[TokenOutput, float]:  # fmt: skip
        """Generate the next turn and add its tokens; returns the answer, and the seconds that it took.

        It is generated from `prompt_ids`, by default all tokens so far, as long as rollout.response_length allows.
        `stops` end it, too.
        """
        room = self.rollout_config.response_length - len(conversation.response_ids)
        sampling = dict(sampling_params)
        sampling["max_tokens"] = min(room, sampling.get("max_tokens", room))
        sampling["stop_token_ids"] = sorted({*sampling.get("stop_token_ids", ()), *stops})
        prompt_ids = conversation.ids if prompt_ids is None else prompt_ids
        started = time.perf_counter()
        output = await self.server_manager.generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling)
        seconds = time.perf_counter() - started
        conversation.add_generated(output.token_ids, output.log_probs, output.weights_version, output.kept_tokens)
        return output, seconds

    def has_room(self, conversation: Conversation, ids: list[int]) -> bool:
        """Whether ids of a tool or user fit into the response and the context, with at least one more token."""
        length = len(conversation.response_ids) + len(ids)
        fits_context = len(conversation.prompt_ids) + length < most_tokens(self.rollout_config)
        return fits_context and length < self.rollout_config.response_length

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run one conversation."""
