"""Compatibility with verl: AsyncRolloutRequest, a conversation as an object of messages and tensors, and its parts."""

from enum import StrEnum
from typing import Any

import torch
from loguru import logger
from pydantic import BaseModel, ConfigDict, PrivateAttr, model_validator

from verl.utils.tokenizer import stop_ids
from verl.workers.rollout.conversation import Conversation
from verl.workers.rollout.message_encoder import SYSTEM, USER, MessageEncoder
from verl.workers.rollout.tools.schemas import OpenAIFunctionToolCall, OpenAIFunctionToolSchema, ToolResponse

# A conversation with no content of its own, to measure what a chat template puts around messages.
BASE_CHAT_HISTORY = [SYSTEM, USER]


class FinishReasonTypeEnum(StrEnum):
    """Why a generation ended."""

    LENGTH = "length"
    STOP = "stop"
    TOOL_CALL = "tool_calls"

    @classmethod
    def from_str(cls, value: str) -> "FinishReasonTypeEnum":
        """The member of this value; ValueError for an unknown one."""
        return cls(value)


class AsyncRolloutRequestStateEnum(StrEnum):
    """What a conversation is doing."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    TOOL_CALLING = "tool_calling"
    INTERACTING = "interacting"


class TokenizationSanityCheckModeEnum(StrEnum):
    """How `finalize` compares the ids with those of the finished messages, encoded at once."""

    DISABLE = "disable"
    STRICT = "strict"
    IGNORE_STRIPPABLE = "ignore_strippable"


class Message(BaseModel):
    """A message of a chat."""

    role: str
    content: str | dict[str, Any] | list[dict[str, Any]] | ToolResponse
    tool_calls: list[OpenAIFunctionToolCall] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        fields = self.model_dump(exclude_none=True)
        if isinstance(self.content, ToolResponse):
            fields["content"] = _text(self.content)
        return fields


class AsyncRolloutRequest(BaseModel):
    """A conversation, as messages and as tensors [1, T], to which turns are added.

    The tensors are a view: ids and masks are those of an append-only Conversation, whose added messages are encoded by
    MessageEncoder. Ids that a model generated (`content_ids`) stay as they are. The constructor takes
    `processing_class`, a tokenizer with a chat template; images and videos are refused (ValueError).

    Attributes (all int64 [1, T], except where noted):
        input_ids, prompt_ids, response_ids: the ids; a prompt ends where the first turn of the model begins.
        attention_mask, position_ids, loss_mask: the same three parts each; the loss mask is 1 on turns of the model.
        generation_prompt_ids: what the template adds for the model to continue, [1, G].
        output_token_ids: the ids that the model generated.
        rollout_log_probs: float32 [1, R], 0 outside of generated turns; None if no turn has any.
        base_conv_wo_gen_prompt_end_pos, base_conv_with_gen_prompt_end_pos: tokens of BASE_CHAT_HISTORY, without and
            with the generation prompt.
        max_prompt_len, max_response_len, max_model_len: limits in tokens, which `truncate_output_ids` applies.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    batch_data_id: int = 0
    rollout_offset: int = 0
    request_id: str
    state: AsyncRolloutRequestStateEnum
    messages: list[Message]
    multi_modal_keys: list[str] | None = None
    multi_modal_data: dict[str, Any] | None = None
    multi_modal_inputs: dict[str, torch.Tensor] | None = None
    tool_schemas: list[OpenAIFunctionToolSchema] | None = None
    tools_kwargs: dict[str, Any] = {}
    interaction_kwargs: dict[str, Any] = {}
    reward_scores: dict[str, Any]
    max_prompt_len: int
    max_response_len: int = 8192
    max_model_len: int = 32768
    metrics: dict[str, list[Any]] = {}
    use_inference_chat_template: bool
    tokenization_sanity_check_mode: TokenizationSanityCheckModeEnum
    generation_prompt_ids: torch.Tensor | None = None
    base_conv_wo_gen_prompt_end_pos: int = 0
    base_conv_with_gen_prompt_end_pos: int = 0

    _conversation: Conversation = PrivateAttr()
    _encoder: MessageEncoder = PrivateAttr()
    _awaits_model: bool = PrivateAttr(default=False)  # the generation prompt is the end of the ids
    _kept: int | None = PrivateAttr(default=None)  # response tokens that the limits leave

    @model_validator(mode="wrap")
    @classmethod
    def initialize_request(cls, values: Any, handler: Any) -> "AsyncRolloutRequest":
        """Encode the first messages with `processing_class`. Raises ValueError without messages or for images."""
        if isinstance(values, cls):
            return values
        given = {name: value for name, value in dict(values).items() if name not in _TENSORS or value is not None}
        processing_class = given.pop("processing_class", None)
        if processing_class is None:
            raise ValueError("processing_class is missing: a tokenizer with a chat template")
        if not given.get("messages"):
            raise ValueError("messages is empty; a conversation begins with at least one message")
        if any(given.get(name) for name in ("multi_modal_keys", "multi_modal_data", "multi_modal_inputs")):
            raise ValueError("multi_modal_* is set; conversations with images or videos are not supported")
        request = handler(given)
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        encoder = request._encoder = MessageEncoder(tokenizer, stop_ids(tokenizer))
        bare = encoder.prompt(BASE_CHAT_HISTORY, request._tools, add_generation_prompt=False)
        prompted = encoder.prompt(BASE_CHAT_HISTORY, request._tools)
        request.base_conv_wo_gen_prompt_end_pos = len(bare)
        request.base_conv_with_gen_prompt_end_pos = len(prompted)
        request.generation_prompt_ids = _row(prompted[len(bare) :])
        messages = [message.as_dict() for message in request.messages]
        request._conversation = Conversation(encoder.prompt(messages, request._tools, add_generation_prompt=False))
        if (length := len(request._conversation.prompt_ids)) > request.max_prompt_len:
            logger.warning(
                f"request {request.request_id}: its prompt has {length} tokens, more than "
                f"max_prompt_len={request.max_prompt_len}"
            )
        return request

    @property
    def _tools(self) -> list[dict[str, Any]] | None:
        return [schema.model_dump(exclude_none=True) for schema in self.tool_schemas or ()] or None

    def get_generation_prompt_ids(self, processing_class: Any) -> list[int]:
        """All ids so far, with the generation prompt at the end: what an engine is asked to continue.

        With use_inference_chat_template they are those of the messages, encoded at once: a template may leave the
        reasoning of earlier turns out.
        """
        if not self._awaits_model:
            self._add(self.generation_prompt_ids[0].tolist())
            self._awaits_model = True
        if self.use_inference_chat_template:
            return self._encoder.prompt([message.as_dict() for message in self.messages], self._tools)
        return self._conversation.ids

    def add_user_message(self, processing_class: Any, content: str) -> None:
        """Add what a user says, after a turn of the model."""
        self._add_messages([Message(role="user", content=content)])

    def add_assistant_message(
        self, processing_class: Any, content: str, content_ids: torch.Tensor | list[int] | None = None,
        tool_calls: list[OpenAIFunctionToolCall] | None = None, log_probs: list[float] | None = None,
    ) -> None:  # fmt: skip
        """Add a turn of the model: its ids as generated, [T] or [1, T], or else `content` as the template encodes it.

        `log_probs` are those of `content_ids`, [T]. Raises ValueError unless all turns, or none, have them.
        """
        self.get_generation_prompt_ids(processing_class)
        message = Message(role="assistant", content=content, tool_calls=tool_calls)
        if content_ids is None:
            base = [*BASE_CHAT_HISTORY, message.as_dict()]
            rendered = self._encoder.prompt(base, self._tools, add_generation_prompt=False)
            ids = self._encoder.without_separator(rendered)[self.base_conv_with_gen_prompt_end_pos :]
        else:
            ids = torch.as_tensor(content_ids).reshape(-1).tolist()
        self.messages.append(message)
        self._conversation.add_generated(ids, log_probs)
        self._awaits_model = False

    def add_tool_response_messages(self, processing_class: Any, contents: list[ToolResponse]) -> None:
        """Add what the tools of the model's last turn answered, in order; empty answers are added too."""
        if contents:
            self._add_messages([Message(role="tool", content=_text(content)) for content in contents])

    def _add_messages(self, messages: list[Message]) -> None:
        if self._awaits_model or self.messages[-1].role != "assistant":
            raise ValueError(f"a message of role {messages[0].role!r} follows only a turn of the model")
        given = [message.as_dict() for message in messages]
        added = self._encoder.encode_appended(given, self._tools, add_generation_prompt=False)
        self.messages += messages
        self._add(added)

    def _add(self, ids: list[int]) -> None:
        """Before the first turn of the model, ids belong to the prompt."""
        if self._conversation.turns:
            self._conversation.add_given(ids)
        else:
            self._conversation.prompt_ids += ids

    def update_metrics(self, metrics: Any, tool_id: str) -> None:
        """Append what a call of a tool measured."""
        self.metrics.setdefault(tool_id, []).append(metrics)

    def finalize(
        self, processing_class: Any, reward_scores: dict[str, list[float]],
        finish_reason_type: FinishReasonTypeEnum = FinishReasonTypeEnum.STOP,
    ) -> None:  # fmt: skip
        """End the conversation: completed, with its rewards, compared with the messages encoded at once, and truncated.

        A difference is a warning; mode ignore_strippable ignores whitespace around the differing parts, and after a
        finish reason "length" the end of the last turn may be missing.
        """
        self.state = AsyncRolloutRequestStateEnum.COMPLETED
        self.reward_scores = reward_scores
        deviation = self._encoder.deviation(
            self._conversation.ids, [message.as_dict() for message in self.messages], self._tools,
            mode=self.tokenization_sanity_check_mode, awaits_model=self._awaits_model,
            cut=finish_reason_type == FinishReasonTypeEnum.LENGTH,
        )  # fmt: skip
        if deviation:
            logger.warning(f"request {self.request_id}: {deviation}")
        self.truncate_output_ids(processing_class)

    def truncate_output_ids(self, processing_class: Any) -> None:
        """Cut the response to max_response_len, and the whole to max_model_len, tokens."""
        room = self.max_model_len - len(self._conversation.prompt_ids)
        self._kept = max(0, min(self.max_response_len, room))

    @property
    def _response(self) -> slice:
        return slice(0, self._kept)

    @property
    def prompt_ids(self) -> torch.Tensor:
        return _row(self._conversation.prompt_ids)

    @property
    def response_ids(self) -> torch.Tensor:
        return _row(self._conversation.response_ids[self._response])

    @property
    def input_ids(self) -> torch.Tensor:
        return torch.cat([self.prompt_ids, self.response_ids], 1)

    @property
    def prompt_attention_mask(self) -> torch.Tensor:
        return torch.ones_like(self.prompt_ids)

    @property
    def response_attention_mask(self) -> torch.Tensor:
        return torch.ones_like(self.response_ids)

    @property
    def attention_mask(self) -> torch.Tensor:
        return torch.ones_like(self.input_ids)

    @property
    def position_ids(self) -> torch.Tensor:
        return torch.arange(self.input_ids.shape[1])[None]

    @property
    def prompt_position_ids(self) -> torch.Tensor:
        return self.position_ids[:, : self.prompt_ids.shape[1]]

    @property
    def response_position_ids(self) -> torch.Tensor:
        return self.position_ids[:, self.prompt_ids.shape[1] :]

    @property
    def prompt_loss_mask(self) -> torch.Tensor:
        return torch.zeros_like(self.prompt_ids)

    @property
    def response_loss_mask(self) -> torch.Tensor:
        return _row(self._conversation.response_mask[self._response])

    @property
    def loss_mask(self) -> torch.Tensor:
        return torch.cat([self.prompt_loss_mask, self.response_loss_mask], 1)

    @property
    def output_token_ids(self) -> torch.Tensor:
        return self.response_ids[self.response_loss_mask.bool()][None]

    @property
    def rollout_log_probs(self) -> torch.Tensor | None:
        values = self._conversation.response_logprobs
        return None if values is None else torch.tensor([values[self._response]], dtype=torch.float32)


_TENSORS = {name for name, member in vars(AsyncRolloutRequest).items() if isinstance(member, property)}


def _row(ids: list[int]) -> torch.Tensor:
    return torch.tensor([ids], dtype=torch.int64)


def _text(response: ToolResponse) -> str:
    if response.image or response.video:
        raise ValueError("a tool answered with images or videos; conversations are text only")
    return response.text or ""
