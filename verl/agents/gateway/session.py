"""The conversation of one program with the model."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from verl.agents.agent_loop.server_manager import AsyncLLMServerManager, most_tokens, seed_of
from verl.agents.agent_loop.tool_parser import ToolParser
from verl.agents.conversation import ConversationTree
from verl.agents.gateway.messages import RequestError, conversation_keys, digest_of, key_after
from verl.agents.message_encoder import CALL_ID, MessageEncoder, NotAppendable
from verl.config.rollout import RolloutConfig
from verl.data.chat_template import ChatTemplateError
from verl.rollout.replica import TokenOutput

TOO_LONG = "context_length_exceeded"  # the code of OpenAI's API


@dataclass
class Choice:
    """One reply: the message for the client, why it ended (stop, length, tool_calls), ids [T] and log-probs [T]."""

    message: dict[str, Any]
    finish_reason: str
    ids: list[int]
    log_probs: list[float] | None


@dataclass
class Answer:
    """The replies to one request, and the number of tokens of its prompt."""

    choices: list[Choice]
    prompt_tokens: int
    cached_tokens: int = 0


@dataclass
class SessionSettings:
    """What all sessions of a worker share."""

    server_manager: AsyncLLMServerManager
    encoder: MessageEncoder
    parser_name: str

    @property
    def rollout(self) -> RolloutConfig:
        """The settings of the rollout."""
        return self.server_manager.rollout_config


@dataclass
class Session:
    """Requests of one program, recorded as a tree of token ids (see ConversationTree).

    A request whose messages continue a reply of this session continues its token ids: the added messages are encoded
    by MessageEncoder.encode_appended. Where the template does not allow for this, or the program has changed the
    history, all messages are encoded as the template renders them, which may begin a branch of the tree.

    All rows together have at most rollout.response_length tokens. A request that sets no limit may use what is left;
    until it has ended, other requests that need more than the rest wait.

    Attributes:
        settings: see SessionSettings.
        sampling: parameters of the run's samples, for AsyncLLMServerManager.generate; those of requests do not count.
        name: request id of the conversation.
        max_requests: number of requests after which the session fails.
    """

    settings: SessionSettings
    sampling: dict[str, Any]
    name: str
    max_requests: int
    tree: ConversationTree = field(default_factory=ConversationTree)
    reward: float | None = None
    failure: str | None = None  # what the program did, if the conversation cannot be used
    on_failure: Callable[[], None] = lambda: None  # called when `failure` is set
    is_full: bool = False  # a request did not fit into response_length any more
    is_cut: bool = False  # the last reply, or one of those to the last prompt, was cut at a limit
    is_aborted: bool = False  # a generation was aborted by the server
    seconds: float = 0.0  # in which at least one generation ran
    requests: int = 0
    responses: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # of the responses API, by id

    def __post_init__(self) -> None:
        self._ids_after: dict[bytes, list[int]] = {}  # all ids of a conversation up to a reply, by `key_after`
        self._asked: Counter[bytes] = Counter()  # number of replies to a prompt, for their seeds
        self._calls = self._reserved = self._running = 0
        self._changed = asyncio.Condition()
        self._began = 0.0

    async def generate(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, *, n: int = 1,
        max_tokens: int | None = None, stop: tuple[str, ...] = (),
    ) -> Answer:  # fmt: skip
        """`n` replies to the messages (see `template_messages`), of at most `max_tokens` tokens each.

        A reply ends with the first text of `stop`. Raises RequestError for messages that the template or the limits
        refuse.
        """
        self.requests += 1
        if self.requests > self.max_requests:
            self.failure = f"made more than {self.max_requests} requests (rollout.agent.command_requests)"
            self.on_failure()
            raise RequestError(f"the program {self.failure}", 429, "too_many_requests")
        keys = conversation_keys(tools, messages)
        prompt = self._encode(messages, tools, keys)
        limit, reserved = await self._reserve(prompt, n, max_tokens)
        try:
            outputs = await self._outputs(prompt, n, limit)
            choices = [await self._choice(output, prompt, tools, stop) for output in outputs]
            for choice, output in zip(choices, outputs, strict=True):
                kept = output.kept_tokens and output.kept_tokens[: len(choice.ids)]
                self.tree.add(prompt, choice.ids, choice.log_probs, output.weights_version, kept)
                self._ids_after.setdefault(key_after(keys[-1], choice.message), [*prompt, *choice.ids])
            self.is_cut = any(choice.finish_reason == "length" for choice in choices)
        finally:
            async with self._changed:
                self._reserved -= reserved
                self._changed.notify_all()
        return Answer(choices, len(prompt), max(output.cached_tokens for output in outputs))

    def _encode(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, keys: list[bytes]
    ) -> list[int]:  # fmt: skip
        """The prompt: the ids of the longest known beginning, and those of the other messages; else of all messages."""
        settings, encoder = self.settings.rollout.multi_turn, self.settings.encoder
        at_once = settings.row_per_turn or settings.use_inference_chat_template
        known = max((number for number in range(1, len(messages)) if keys[number] in self._ids_after), default=0)
        if known and not at_once:
            ids, added = self._ids_after[keys[known]], messages[known:]
            expected_role = "tool" if messages[known - 1].get("tool_calls") else "user"
            if ids[-1] in encoder.stop_ids and all(message["role"] == expected_role for message in added):
                with contextlib.suppress(NotAppendable):
                    return ids + encoder.encode_appended(added, tools, after=ids[-1])
        try:
            return encoder.prompt(messages, tools)
        except ChatTemplateError as error:
            raise RequestError(str(error)) from error

    async def _reserve(self, prompt: list[int], n: int, max_tokens: int | None) -> tuple[int, int]:
        """(tokens that each of `n` replies may have, tokens of the response that are reserved for them)."""
        rollout = self.settings.rollout
        most = most_tokens(rollout)
        if not self.tree.turns and len(prompt) > rollout.prompt_length:
            reason = f"more than actor_rollout_ref.rollout.prompt_length={rollout.prompt_length}"
            raise RequestError(f"the prompt has {len(prompt)} tokens, {reason}", code=TOO_LONG)
        if len(prompt) >= most:
            self.is_full = True
            reason = f"actor_rollout_ref.rollout.prompt_length + response_length, or max_model_len, is {most}"
            raise RequestError(f"the prompt has {len(prompt)} tokens: {reason}", code=TOO_LONG)
        wanted = min(most - len(prompt), max_tokens or most)
        async with self._changed:
            while True:
                appended = self.tree.appended(prompt)
                room = (rollout.response_length - self.tree.response_length - self._reserved - appended) // n
                if room >= wanted or not self._reserved:
                    break
                await self._changed.wait()
            if room < 1:
                self.is_full = True
                reason = f"actor_rollout_ref.rollout.response_length={rollout.response_length}"
                raise RequestError(f"the conversation has no room for a reply: {reason}", code=TOO_LONG)
            limit = min(room, wanted)
            self._reserved += n * limit + appended
        return limit, n * limit + appended

    async def _outputs(self, prompt: list[int], n: int, limit: int) -> list[TokenOutput]:
        """`n` generations of at most `limit` tokens."""
        digest = digest_of(str(prompt).encode())
        calls, stops = [], {*self.sampling.get("stop_token_ids", ()), *self.settings.encoder.stop_ids}
        for _ in range(n):
            sampling = {**self.sampling, "max_tokens": limit, "stop_token_ids": sorted(stops)}
            if "seed" in sampling:  # independent of the order in which parallel requests arrive
                sampling["seed"] = seed_of(f"{sampling['seed']}|{self._asked[digest]}|".encode() + digest)
            self._asked[digest] += 1
            calls.append(
                self.settings.server_manager.generate(self.name, prompt_ids=prompt, sampling_params=sampling, turn=0)
            )
        if not self._running:
            self._began = time.perf_counter()
        self._running += 1
        try:
            outputs = await asyncio.gather(*calls)
        finally:
            self._running -= 1
            if not self._running:
                self.seconds += time.perf_counter() - self._began
        if any(output.stop_reason == "aborted" for output in outputs):
            self.is_aborted = True
            raise RequestError("the generation was aborted", 503)
        return outputs

    async def _choice(
        self, output: TokenOutput, prompt: list[int], tools: list[dict[str, Any]] | None, stop: tuple[str, ...]
    ) -> Choice:  # fmt: skip
        """The reply for an output, of which only the part up to the first text of `stop` counts."""
        tokenizer = self.settings.encoder.tokenizer
        parser = ToolParser.get_tool_parser(self.settings.parser_name, tokenizer, tools or ())
        ids, ended = _until(tokenizer, output.token_ids, stop)
        written = list(ids)
        while written and written[-1] in self.settings.encoder.stop_ids:
            written.pop()
        in_reasoning = parser.begins_reasoning(prompt)
        _, calls = await parser.extract_tool_calls(written, in_reasoning)
        for call in calls:
            call.id = call.id or CALL_ID % self._calls
            self._calls += 1
        if calls and not tools:
            message = {"role": "assistant", "content": tokenizer.decode(written)}
        else:
            message = parser.message(written, in_reasoning, calls)
        for text in stop:
            message["content"] = message["content"].partition(text)[0]
        reason = "length" if output.stop_reason == "length" and not ended else "stop"
        if reason == "stop" and "tool_calls" in message:
            reason = "tool_calls"
        log_probs = output.log_probs and output.log_probs[: len(ids)]
        return Choice(message, reason, ids, log_probs)


def _until(tokenizer: Any, ids: list[int], stop: tuple[str, ...]) -> tuple[list[int], bool]:
    """(the ids up to the one that completes a text of `stop`, whether there is one)."""

    def has_stop(count: int) -> bool:
        text = tokenizer.decode(ids[:count])
        return any(part in text for part in stop)

    if not has_stop(len(ids)):
        return ids, False
    # The smallest count whose ids have one; a search by halves, since each decodes all ids up to it.
    return ids[: bisect.bisect_left(range(len(ids)), True, key=has_stop)], True
