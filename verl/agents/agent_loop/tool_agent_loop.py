"""The agent loop of conversations with tools and interactions."""

import asyncio
import time
from enum import Enum
from typing import Any
from uuid import uuid4

from loguru import logger

from verl.agents.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, DictConfigWrap, output_of
from verl.agents.agent_loop.registry import register
from verl.agents.agent_loop.server_manager import most_tokens
from verl.agents.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.agents.conversation import Conversation
from verl.agents.interactions.base import BaseInteraction
from verl.agents.interactions.interaction_registry import initialize_interactions_from_config
from verl.agents.message_encoder import CALL_ID
from verl.agents.rollout_trace import rollout_trace_op
from verl.agents.tools.journal import ToolJournal
from verl.agents.tools.runner import ToolConversation, ToolRunner
from verl.agents.tools.schemas import ToolResponse
from verl.agents.tools.tool_registry import initialize_tools_from_config, tool_schemas
from verl.config.rollout import MultiTurnConfig
from verl.data.chat_template import ChatTemplateError, answer_text
from verl.reward.pool import FatalGradingError


class AgentState(Enum):
    """What a conversation does next."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    TERMINATED = "terminated"
    INTERACTING = "interacting"


#: The handler of each state; a handler returns the next state.
HANDLERS = {
    AgentState.PENDING: "_handle_pending_state",
    AgentState.GENERATING: "_handle_generating_state",
    AgentState.PROCESSING_TOOLS: "_handle_processing_tools_state",
    AgentState.INTERACTING: "_handle_interacting_state",
}
#: The states that may follow each state.
TRANSITIONS = {
    AgentState.PENDING: {AgentState.GENERATING, AgentState.TERMINATED},
    AgentState.GENERATING: {AgentState.PROCESSING_TOOLS, AgentState.INTERACTING, AgentState.TERMINATED},
    AgentState.PROCESSING_TOOLS: {AgentState.GENERATING, AgentState.TERMINATED},
    AgentState.INTERACTING: {AgentState.GENERATING, AgentState.TERMINATED},
}
#: Why a conversation ended: the model stopped or the interaction was content, the tokens or the turns were used up, the
#: template refused the messages so far (multi_turn.row_per_turn), the interaction failed, the generation was aborted.
#: Conversations of the last two are lost.
END_REASONS = ("stop", "length", "turns", "template", "tool_failed", "cancelled")


class AgentData:
    """One conversation in progress: messages, tokens, tools, scores."""

    def __init__(
        self, messages: list[dict[str, Any]], image_data: Any = None, video_data: Any = None,
        metrics: dict[str, Any] | None = None, request_id: str = "", tools_kwargs: dict[str, Any] | None = None,
        interaction: BaseInteraction | None = None, interaction_kwargs: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.messages, self.image_data, self.video_data = messages, image_data, video_data
        self.metrics = {} if metrics is None else metrics
        self.request_id, self.tools_kwargs = request_id, tools_kwargs or {}
        self.interaction, self.interaction_kwargs = interaction, dict(interaction_kwargs or {})
        self.interaction_id: str | None = None
        self.conversation = Conversation([])
        self.tools: ToolConversation | None = None
        self.turn_scores: list[float] = []
        self.tool_rewards: list[float] = []
        self.user_turns = self.assistant_turns = self.tool_call_count = self.failed_tool_calls = 0
        self.seed: int | None = None
        self.step = -1  # of the training
        self.tool_calls: list[FunctionCall] = []  # of the last turn
        self.turn_prompts: list[list[int]] = []  # what the turns were generated from (multi_turn.row_per_turn)
        self.end_reason: str | None = None
        self.extra_fields: dict[str, Any] = {}

    @property
    def prompt_ids(self) -> list[int]:
        """All ids so far."""
        return self.conversation.ids

    @property
    def response_ids(self) -> list[int]:
        """The ids after the first prompt."""
        return self.conversation.response_ids

    @property
    def response_mask(self) -> list[int]:
        """1 for a generated id."""
        return self.conversation.response_mask

    @property
    def response_logprobs(self) -> list[float] | None:
        """The log-probs of generated ids, 0 elsewhere."""
        return self.conversation.response_logprobs

    def end(self, reason: str) -> AgentState:
        """TERMINATED, for a reason of END_REASONS, which is noted."""
        self.end_reason = reason
        return AgentState.TERMINATED


class ToolSession:
    """The tools, interactions and journal of one worker, for all its conversations."""

    def __init__(self, settings: MultiTurnConfig, run_folder: str) -> None:
        tools = initialize_tools_from_config(settings.tool_config_path, settings.function_tool_path)
        self.runner = ToolRunner(
            tools, max_tool_response_length=settings.max_tool_response_length,
            tool_response_truncate_side=settings.tool_response_truncate_side, timeout=settings.tool_timeout,
        )  # fmt: skip
        self.journal = ToolJournal(run_folder, tools) if settings.journal_tool_calls and tools else None
        path = settings.interaction_config_path
        self.interactions: dict[str, BaseInteraction] = initialize_interactions_from_config(path) if path else {}
        self.warned_of_tokenization = False  # of a conversation whose ids differ from those of its messages


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Generates, runs the calls that it finds or asks the interaction, and continues until the conversation ends.

    Tools come from rollout.multi_turn.tool_config_path and function_tool_path, interactions from
    interaction_config_path; all are created once for all conversations of a worker. A conversation ends at a turn's
    boundary once an answer of a tool or user does not fit into rollout.response_length with at least one more token.
    """

    def __init__(self, trainer_config: DictConfigWrap, *args: Any, **kwargs: Any) -> None:
        super().__init__(trainer_config, *args, **kwargs)
        self.settings = settings = self.rollout_config.multi_turn
        if "tools" not in trainer_config.shared:
            trainer_config.shared["tools"] = ToolSession(settings, self.config.trainer.default_local_dir)
        self.session: ToolSession = trainer_config.shared["tools"]
        self.runner, self.interactions = self.session.runner, self.session.interactions
        self.tool_schemas = tool_schemas(self.runner.tools.values())
        self.parser = ToolParser.get_tool_parser(settings.format, self.tokenizer, self.tool_schemas)
        self.encoder.stop_ids |= set(self.parser.stop_token_ids)

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        data = AgentData(
            [dict(message) for message in kwargs["raw_prompt"]], request_id=kwargs.get("request_id") or uuid4().hex,
            metrics={"generate_sequences": 0.0, "tool_calls": 0.0}, tools_kwargs=kwargs.get("tools_kwargs"),
            interaction_kwargs=kwargs.get("interaction_kwargs"),
        )  # fmt: skip
        data.seed, data.step = sampling_params.get("seed"), kwargs.get("trajectory", {}).get("step", -1)
        async with self.runner.conversation(data.tools_kwargs, self.session.journal) as data.tools:
            try:
                state = AgentState.PENDING
                while state is not AgentState.TERMINATED:
                    handle = getattr(self, HANDLERS[state])
                    following = self._check_transition(state, await handle(data, sampling_params))
                    # Not in the handler of PENDING, which a subclass may replace.
                    if self.interactions and (state, following) == (AgentState.PENDING, AgentState.GENERATING):
                        following = await self._start_interaction(data)
                    state = following
                rewards = await data.tools.calc_rewards()
            finally:
                await self._finalize_interaction(data)
        fields = {
            **data.extra_fields, "turn_scores": data.turn_scores, "tool_rewards": data.tool_rewards,
            "reward_scores": rewards, "end_reason": data.end_reason, "tool_call_counts": data.tool_call_count,
            "failed_tool_calls": data.failed_tool_calls,
        }  # fmt: skip
        if self.settings.row_per_turn:
            turns = zip(data.conversation.versions, data.turn_prompts, strict=True)
            fields["turn_prompts"] = [(start, end, prompt) for (_, start, end), prompt in turns]
        elif data.user_turns and data.end_reason in ("stop", "turns"):  # else the last turn may be cut, or no message
            self._check_tokenization(data)
        num_turns = 1 + data.user_turns + data.assistant_turns  # the prompt is one
        return output_of(data.conversation, num_turns, AgentLoopMetrics(**data.metrics), **fields)

    @staticmethod
    def _check_transition(state: AgentState, following: AgentState) -> AgentState:
        """The state that follows; RuntimeError unless TRANSITIONS has it."""
        if following not in TRANSITIONS[state]:
            allowed = ", ".join(sorted(str(allowed) for allowed in TRANSITIONS[state]))
            raise RuntimeError(f"{HANDLERS[state]} returned {following!s}; after {state!s} it may be: {allowed}")
        return following

    def _check_tokenization(self, data: AgentData) -> None:
        """Warn once in a worker if the ids differ from those of the finished messages."""
        if self.session.warned_of_tokenization:
            return
        mode = self.settings.tokenization_sanity_check_mode
        deviation = self.encoder.deviation(data.conversation.ids, data.messages, self.tool_schemas, mode=mode)
        if deviation is not None:
            self.session.warned_of_tokenization = True
            key = f"rollout.multi_turn.tokenization_sanity_check_mode={mode}"
            logger.warning(f"conversation {data.request_id}: {deviation} Further ones are not compared ({key}).")

    async def _handle_pending_state(self, data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        data.conversation.prompt_ids = self.check_prompt(self.encoder.prompt(data.messages, self.tool_schemas))
        return AgentState.GENERATING

    async def _start_interaction(self, data: AgentData) -> AgentState:
        name = data.interaction_kwargs.pop("name", None)
        if name is None and len(self.interactions) == 1:
            (name,) = self.interactions
        if name not in self.interactions:
            raise ValueError(
                f"extra_info.interaction_kwargs.name={name!r} is not in the file of "
                f"actor_rollout_ref.rollout.multi_turn.interaction_config_path. Known: {', '.join(self.interactions)}."
            )
        data.interaction = self.interactions[name]
        data.interaction_id = data.request_id  # finalized also if the start fails
        try:
            start = data.interaction.start_interaction(data.request_id, **data.interaction_kwargs)
            data.interaction_id = await self.runner.run_with_timeout(start)
        except FatalGradingError:
            raise
        except Exception as error:
            self._failed("exception", data.interaction, error)
            return data.end("tool_failed")
        return AgentState.GENERATING

    async def _finalize_interaction(self, data: AgentData) -> None:
        if data.interaction_id is None:
            return
        try:
            await self.runner.run_with_timeout(data.interaction.finalize_interaction(data.interaction_id))
        except Exception as error:
            self._failed("release_failed", data.interaction, error)

    async def _handle_generating_state(self, data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        settings, prompt_ids = self.settings, data.conversation.ids
        if data.assistant_turns and (settings.use_inference_chat_template or settings.row_per_turn):
            try:
                prompt_ids = self.encoder.prompt(data.messages, self.tool_schemas)
            except ChatTemplateError as error:
                logger.warning(f"conversation {data.request_id} ends: {error}")
                return data.end("template")
            if len(prompt_ids) >= most_tokens(self.rollout_config):
                return data.end("length")
        output, seconds = await self.generate_turn(
            data.request_id, data.conversation, sampling_params, prompt_ids, self.parser.stop_token_ids
        )
        data.metrics["generate_sequences"] += seconds
        data.turn_prompts.append(prompt_ids)
        data.assistant_turns += 1
        if output.stop_reason == "aborted":
            return data.end("cancelled")
        is_full = len(data.response_ids) >= self.rollout_config.response_length
        if output.is_cut(is_full):
            return data.end("length")
        starts_reasoning = self.parser.begins_reasoning(prompt_ids)
        _, data.tool_calls = await self.parser.extract_tool_calls(output.token_ids, starts_reasoning)
        data.messages.append(self._message(output.token_ids, data, starts_reasoning))
        if not data.tool_calls and not data.interaction:
            return data.end("stop")
        if is_full:
            return data.end("length")
        if settings.max_assistant_turns and data.assistant_turns >= settings.max_assistant_turns:
            return data.end("turns")
        if settings.max_user_turns and data.user_turns >= settings.max_user_turns:
            return data.end("turns")
        return AgentState.PROCESSING_TOOLS if data.tool_calls else AgentState.INTERACTING

    def _message(self, ids: list[int], data: AgentData, starts_reasoning: bool) -> dict[str, Any]:
        """The last turn as a message, whose calls get the ids that they lack; see also ToolParser.message."""
        for i, call in enumerate(data.tool_calls):
            call.id = call.id or CALL_ID % (data.tool_call_count + i)
        if not self.settings.row_per_turn:
            return {"role": "assistant", "content": answer_text(self.tokenizer, ids)}
        while ids and ids[-1] in self.encoder.stop_ids:
            ids = ids[:-1]
        return self.parser.message(ids, starts_reasoning, data.tool_calls)

    async def _handle_processing_tools_state(self, data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        limit, started = self.settings.max_parallel_calls, time.perf_counter()
        calls = data.tool_calls[:limit]
        results = await asyncio.gather(*(self._call_tool(call, data.tools_kwargs, data) for call in calls))
        data.metrics["tool_calls"] += time.perf_counter() - started
        texts = [response.text or "" for response, _, _ in results]
        for call in data.tool_calls[limit:]:
            texts.append(f"Error: {call.name!r} was not called: one turn may call {limit} tools.")
        data.tool_rewards += [reward for _, reward, _ in results if reward is not None]
        messages = []
        for call, text in zip(data.tool_calls, texts, strict=True):
            messages.append({"role": "tool", "content": text, "name": call.name, "tool_call_id": call.id})
        return self._append(data, messages)

    @rollout_trace_op
    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: dict[str, Any], agent_data: AgentData
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """(the response, the step reward or None, metrics) of one call; a failure is a response with its reason."""
        agent_data.tool_call_count += 1
        if tool_call.error is not None:
            result = self.runner.record_failure("malformed_arguments", tool_call.name, tool_call.error)
        else:
            key, journal = None, self.session.journal
            if journal is not None:
                number = agent_data.tool_call_count
                key = journal.key(agent_data.step, agent_data.seed, agent_data.prompt_ids, number)
            result = await agent_data.tools.call(tool_call.name, tool_call.arguments, key)
            if result.response.image or result.response.video:
                text = f"{tool_call.name!r} answered with images or videos; conversations are text only."
                result = self.runner.record_failure("exception", tool_call.name, text, ValueError(text))
        agent_data.failed_tool_calls += result.failure is not None
        return result.response, result.reward, result.metrics

    async def _handle_interacting_state(self, data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        answer = data.interaction.generate_response(data.interaction_id, data.messages, **data.interaction_kwargs)
        try:
            ends, text, score, extra = await self.runner.run_with_timeout(answer)
            data.extra_fields.update(extra or {})
        except FatalGradingError:
            raise
        except Exception as error:
            self._failed("exception", data.interaction, error)
            return data.end("tool_failed")
        if score is not None:
            data.turn_scores.append(score)
        return data.end("stop") if ends else self._append(data, [{"role": "user", "content": text}])

    def _failed(self, kind: str, interaction: BaseInteraction, error: Exception) -> None:
        text = f"the interaction raised {type(error).__name__}: {error}."
        self.runner.record_failure(kind, interaction.name, text, error)

    def _append(self, data: AgentData, messages: list[dict[str, Any]]) -> AgentState:
        """Append messages of tools or the user, if they fit; with row_per_turn their plain text, only for reports."""
        if self.settings.row_per_turn:
            text = "\n".join(["", *(message["content"] for message in messages), ""])
            ids = self.tokenizer(text.encode("utf-8", "replace").decode(), add_special_tokens=False)["input_ids"]
        else:
            ids = self.encoder.encode_appended(messages, self.tool_schemas, after=data.prompt_ids[-1])
        if not self.has_room(data.conversation, ids):
            return data.end("length")
        data.messages += messages
        data.conversation.add_given(ids)
        data.user_turns += 1
        return AgentState.GENERATING
