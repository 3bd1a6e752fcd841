"""Encodes prompts and appended messages of a conversation with the chat template of the tokenizer."""

import json
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from verl.agents.conversation import common_length
from verl.data.chat_template import ChatTemplateError, render_chat

# Messages of the short conversations that are rendered.
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
USER = {"role": "user", "content": "Hello."}
CALL_ID = "call%05d"  # nine letters and digits, as Mistral's templates require
ARGUMENT_FORMS = {"value": "1"}, '{"value": "1"}'  # of a call: an object, and text for a few templates
ANSWER = {"role": "assistant", "content": "Yes."}
# With reasoning, because some templates add empty reasoning to the last turn only.
TURN_WITH_CALLS = {"role": "assistant", "content": "", "reasoning_content": "Yes."}
OTHER_TEMPLATE = "Set actor_rollout_ref.model.custom_chat_template to one that renders %s"
DIFFERENT = "it renders earlier turns differently once the message follows"


class NotAppendable(ValueError):
    """The chat template does not support messages that are appended to a generated turn."""


class MessageEncoder:
    """Encodes prompts and appended messages.

    To encode appended messages, the template renders a short conversation with and without them. Their ids are those
    that only the longer rendering has. They start with the separator after the stop token of the previous turn, which
    the model does not generate. The ids are independent of the conversation, and ids of earlier turns never change.

    Args:
        tokenizer: a tokenizer with a chat template.
        stop_ids: ids that end a generated turn.
        template_kwargs: further arguments of the template (data.apply_chat_template_kwargs).
    """

    def __init__(self, tokenizer: Any, stop_ids: Collection[int], **template_kwargs: Any) -> None:
        self.tokenizer, self.stop_ids, self.kwargs = tokenizer, set(stop_ids), template_kwargs
        # Tried in this order until one works; it is kept. Some templates do not support system messages.
        self._systems: list[list[dict[str, Any]]] = [[SYSTEM], []]

    def prompt(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:  # fmt: skip
        """The ids of messages, by default with the generation prompt.

        If the template raises an error for arguments of tool calls as objects, they are passed as JSON text.
        Raises ChatTemplateError.
        """
        try:
            return self._render(messages, tools, add_generation_prompt=add_generation_prompt)
        except ChatTemplateError:
            as_text = [_with_text_arguments(message) for message in messages]
            if as_text == messages:
                raise
            return self._render(as_text, tools, add_generation_prompt=add_generation_prompt)

    def encode_appended(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, after: int | None = None
    ) -> list[int]:
        """The ids of messages appended to a generated turn, with the generation prompt.

        Either all messages have the role "tool" and follow a turn with tool calls, or none has. `after` is the last
        generated id: if it is no stop token, the turn was cut, and the ids begin with the stop token that ends it. So
        they do after another stop token than the one with which the template's messages begin.
        Without `after`, the turn is taken to have ended. Raises NotAppendable if the template does not support
        appending: it raises an error, changes earlier turns, or ends a turn without a token of `stop_ids`.
        """
        role, problems = messages[0]["role"], []
        if role == "tool":
            messages = [{"tool_call_id": CALL_ID % i, **message} for i, message in enumerate(messages)]
            bases = []
            for calls_of_turn in sorted({len(messages), 1}, reverse=True):  # some templates support one call per turn
                for form in ARGUMENT_FORMS:
                    calls = [_call_of(message, form) for message in messages[:calls_of_turn]]
                    bases.append([USER, {**TURN_WITH_CALLS, "tool_calls": calls}])
        else:
            bases = [[USER, ANSWER], [USER]]  # some templates change a turn when a user message follows
        for system in self._systems:
            for base in bases:
                try:
                    ids = self._appended_ids([*system, *base], messages, tools, after)
                except (ChatTemplateError, NotAppendable) as error:
                    problems.append(error)
                else:
                    self._systems = [system]
                    return ids
        raise NotAppendable(f"messages of role {role!r} cannot be added by the chat template: {problems[0]}")

    def deviation(
        self, ids: list[int], messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, *,
        mode: str = "strict",
    ) -> str | None:  # fmt: skip
        """How the ids of a conversation differ from those of its messages rendered at once; None if they are equal.

        `mode` is multi_turn.tokenization_sanity_check_mode: "ignore_strippable" ignores leading and trailing whitespace
        of the part that differs, "disable" skips the comparison.
        """
        if mode == "disable":
            return None
        try:
            expected = self.prompt(messages, tools, add_generation_prompt=False)
        except ChatTemplateError as error:
            return f"the template does not render the finished messages: {error}"
        if messages[-1]["role"] == "assistant":
            end = self._last_stop(expected)
            if end is not None:
                expected = expected[: end + 1]
            elif ids and ids[-1] in self.stop_ids:
                expected = [*expected, ids[-1]]  # the template renders no stop token after the last turn
        if ids == expected:
            return None
        start = common_length(ids, expected)
        text, expected_text = self.tokenizer.decode(ids[start:]), self.tokenizer.decode(expected[start:])
        if mode == "ignore_strippable" and text.strip() == expected_text.strip():
            return None
        return (f"the ids differ from those of the finished messages, encoded at once, from position {start}: "
                f"{text[:80]!r} against {expected_text[:80]!r}. The generated ids are kept; with "
                "multi_turn.row_per_turn=true each turn follows what the template renders.")  # fmt: skip

    def check(
        self, roles: Collection[str], tools: list[dict[str, Any]] | None = None, *, at_once: bool = False
    ) -> None:
        """Raise ValueError if messages of these roles cannot be appended, or do not appear in the rendered text.

        `at_once`: all messages are rendered for each turn (multi_turn.row_per_turn), so that appending is not required.
        """
        for role in roles:
            left_out = f"messages of role {role!r}"
            with_text = self._probe(role, ["58"], tools, at_once)  # numbers that no template contains
            is_left_out = with_text == self._probe(role, [""], tools, at_once)
            if role == "tool":  # some templates render only one tool response of a turn
                two = self._probe(role, ["4217", "58"], tools, at_once)
                is_left_out |= two == self._probe(role, ["4217", ""], tools, at_once)
            if at_once and role == "tool" and not is_left_out:
                with suppress(ChatTemplateError):  # many templates refuse a tool response without a call
                    left_out = "calls of tools"
                    is_left_out = with_text == self._probe(role, ["58"], tools, at_once, called=False)
            if is_left_out:
                raise ValueError(f"the chat template leaves {left_out} out. {OTHER_TEMPLATE % left_out}")

    def _probe(self, role: str, texts: list[str], tools: Any, at_once: bool, called: bool = True) -> list[int]:
        """The ids of messages with these texts, appended or, with `at_once`, rendered in a short conversation."""
        messages = [{"role": role, "content": text} for text in texts]
        if not at_once:
            try:
                return self.encode_appended(messages, tools)
            except NotAppendable as error:
                with suppress(ChatTemplateError):
                    self._probe(role, texts, tools, at_once=True)
                    key = "actor_rollout_ref.rollout.multi_turn.row_per_turn"
                    raise ValueError(f"{error}. Set {key}=true for this template") from None
                raise ValueError(f"{error}. {OTHER_TEMPLATE % f'messages of role {role!r}'}") from error
        if role != "tool":
            return self.prompt([USER, ANSWER, *messages], tools)
        messages = [{"tool_call_id": CALL_ID % i, "name": "tool", **message} for i, message in enumerate(messages)]
        calls = {"tool_calls": [_call_of(message, ARGUMENT_FORMS[0]) for message in messages]} if called else {}
        return self.prompt([USER, {**TURN_WITH_CALLS, **calls}, *messages], tools)

    def _appended_ids(
        self, base: list[dict[str, Any]], messages: list[dict[str, Any]], tools: Any, after: int | None
    ) -> list[int]:
        """What the messages add after the end of the base's last turn.

        Raises ChatTemplateError, or NotAppendable if it cannot be determined.
        """
        shorter = self._render(base, tools)
        longer = self._render([*base, *messages], tools, add_generation_prompt=True)
        if self._last_stop(shorter) is None:
            # The template omits the end of the last turn, or a turn's stop token is the start of the next message.
            end = next((i for i in range(len(shorter), len(longer)) if longer[i] in self.stop_ids), None)
            if end is None or self.tokenizer.decode(longer[len(shorter) : end]).strip():
                stops = sorted(self.stop_ids)
                raise NotAppendable(f"it ends the turn before with none of the stop tokens (ids {stops})")
            if longer[: len(shorter)] != shorter:
                raise NotAppendable(DIFFERENT)
            was_generated = after is None or after == longer[end]
            return longer[end + 1 :] if was_generated else longer[end:]
        ends = [i for i, token in enumerate(shorter) if token in self.stop_ids]
        # A template may add an end-of-text token to the stop token of the last turn.
        two_stops = len(ends) > 1 and not self.tokenizer.decode(shorter[ends[-2] + 1 : ends[-1]]).strip()
        was_cut = after is not None and after not in self.stop_ids
        for end in ends[-2:] if two_stops else ends[-1:]:
            if longer[: end + 1] == shorter[: end + 1]:
                return longer[end:] if was_cut else longer[end + 1 :]
        raise NotAppendable(DIFFERENT)

    def _last_stop(self, ids: list[int]) -> int | None:
        """The position of the last turn's stop token; None if the last turn has no stop token."""
        end = next((i for i in reversed(range(len(ids))) if ids[i] in self.stop_ids), None)
        text_follows = end is not None and self.tokenizer.decode(ids[end + 1 :], skip_special_tokens=True).strip()
        return None if text_follows else end

    def _render(self, messages: list[dict[str, Any]], tools: Any, **settings: Any) -> list[int]:
        text = render_chat(self.tokenizer, messages, tools=tools or None, **settings, **self.kwargs)
        text = text.encode("utf-8", "replace").decode()  # arguments of calls may contain lone surrogates
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def _call_of(answer: dict[str, Any], arguments: Any) -> dict[str, Any]:
    """The tool call to which a tool message responds; templates render its name or its id."""
    function = {"name": answer.get("name") or "tool", "arguments": arguments}
    return {"id": answer["tool_call_id"], "type": "function", "function": function}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with arguments of tool calls as JSON text instead of objects."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if isinstance(function["arguments"], dict):
            function["arguments"] = json.dumps(function["arguments"])
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}
