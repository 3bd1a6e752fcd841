"""The agent loop of conversations that an environment leads (data.environment.max_turns above 1)."""

import time
from typing import Any
from uuid import uuid4

from loguru import logger

from verl.agents.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, DictConfigWrap, output_of
from verl.agents.agent_loop.registry import register
from verl.agents.agent_loop.tool_parser import ToolParser
from verl.agents.conversation import Conversation
from verl.agents.environments.hosting import EnvironmentFailed
from verl.agents.environments.processes import EnvironmentConversation, EnvironmentPool
from verl.agents.message_encoder import CALL_ID
from verl.agents.rollout_trace import rollout_trace_op
from verl.config.compose import to_settings
from verl.config.environment import EnvironmentConfig
from verl.data.chat_template import answer_text

_COMPARED = ("role", "content", "tool_calls")  # of earlier messages, which an environment must not change


class EnvironmentState:
    """One conversation: the environment's process, the messages and tokens so far."""

    def __init__(self, request_id: str, sampling_params: dict[str, Any]) -> None:
        self.request_id, self.sampling_params = request_id, sampling_params
        self.messages: list[dict[str, Any]] = []
        self.conversation: Conversation | None = None
        self.turns, self.end_reason = 0, "stop"
        self.generation_s = self.environment_s = 0.0


@register("environment_agent")
class EnvironmentAgentLoop(AgentLoopBase):
    """Gives the environment the model's turns that it asks for, until it returns the scores of the conversation.

    The environment's messages are appended to the tokens; a conversation whose earlier messages it changes has failed.
    Failed conversations are lost: they are named in the log, counted as agent_loop/end/tool_failed, and not scored. At
    the limits of tokens or turns the environment scores what it has.
    """

    def __init__(self, trainer_config: DictConfigWrap, *args: Any, **kwargs: Any) -> None:
        super().__init__(trainer_config, *args, **kwargs)
        if "environment" not in trainer_config.shared:
            settings = to_settings(self.config.data.environment, EnvironmentConfig)
            trainer_config.shared["environment"] = EnvironmentPool(settings)
        self.pool: EnvironmentPool = trainer_config.shared["environment"]

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        state = EnvironmentState(kwargs.get("request_id") or uuid4().hex, sampling_params)
        scores: dict[str, Any] = {}
        try:
            async with self.pool.conversation(kwargs["extra_info"]["environment"]) as environment:
                while not scores:
                    started = time.perf_counter()
                    kind, content = await environment.next()
                    state.environment_s += time.perf_counter() - started
                    if kind == "done":
                        scores = content
                    else:
                        await self._answer(environment, state, *content)
        except EnvironmentFailed as error:
            logger.warning("conversation {} is lost: {}", state.request_id, error)
            state.end_reason = "tool_failed"
        conversation = state.conversation or Conversation([])
        metrics = AgentLoopMetrics(generate_sequences=state.generation_s, tool_calls=state.environment_s)
        fields = {"reward_scores": scores, "end_reason": state.end_reason}
        return output_of(conversation, 2 * state.turns, metrics, **fields)

    async def _answer(
        self, environment: EnvironmentConversation, state: EnvironmentState, messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
    ) -> None:  # fmt: skip
        """Generate the next turn, unless a limit is reached: then the environment is informed that there is none."""
        parser = ToolParser.get_tool_parser(self.rollout_config.multi_turn.format, self.tokenizer, tools or [])
        tool_stops = parser.stop_token_ids if tools else []
        self.encoder.stop_ids |= set(tool_stops)
        if state.turns == self.pool.settings.max_turns:
            state.end_reason = "turns"
            return environment.end(f"the conversation has had data.environment.max_turns={state.turns} answers")
        if not self._add_messages(state, messages, tools):
            state.end_reason = "length"
            return environment.end("the tokens of a conversation are used up")
        output, seconds = await self.generate_turn(
            state.request_id, state.conversation, state.sampling_params, stops=tool_stops
        )
        state.generation_s += seconds
        state.turns += 1
        if output.stop_reason == "aborted":
            raise EnvironmentFailed("the generation was aborted")
        is_full = len(state.conversation.response_ids) >= self.rollout_config.response_length
        state.end_reason = "length" if output.is_cut(is_full) else "stop"
        message = {"role": "assistant", "content": answer_text(self.tokenizer, output.token_ids)}
        if tools and state.end_reason == "stop":
            content, calls = await parser.extract_tool_calls(output.token_ids)
            for i, call in enumerate(calls):
                call.id = call.id or CALL_ID % (100 * state.turns + i)  # one number a call; turns have fewer than 100
            readable = list(filter(None, [call.as_message() for call in calls]))
            if readable:
                message |= {"content": content, "tool_calls": readable}
        state.messages = [*messages, message]
        environment.reply({**message, "finish_reason": state.end_reason})

    def _add_messages(
        self, state: EnvironmentState, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> bool:
        """Add the tokens of messages that are new; returns False if they leave no room for an answer."""
        if state.conversation is None:
            state.conversation = Conversation(self.check_prompt(self.encoder.prompt(messages, tools)))
            return True
        known = len(state.messages)
        if any(map(_differ, state.messages, messages)) or len(messages) <= known:
            name = self.pool.settings.name
            raise EnvironmentFailed(f"environment {name} changed earlier messages, whose tokens are fixed")
        given = self.encoder.encode_appended(messages[known:], tools, after=state.conversation.ids[-1])
        if not self.has_room(state.conversation, given):
            return False
        state.conversation.add_given(given)
        return True


def _differ(known: dict[str, Any], given: dict[str, Any]) -> bool:
    """Whether a message that an environment sends again is another one; names and ids of calls may be left out."""
    if known["role"] == "assistant" and known.get("tool_calls"):
        return given["role"] != "assistant" or len(given.get("tool_calls") or ()) != len(known["tool_calls"])
    return any((known.get(key) or "") != (given.get(key) or "") for key in _COMPARED)
