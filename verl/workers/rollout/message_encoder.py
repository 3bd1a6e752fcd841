"""Token ids of messages that are added to a conversation, by the chat template of the tokenizer."""

import json
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from verl.data.chat_template import ChatTemplateError, render_chat

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
USER = {"role": "user", "content": "Hello."}
CALL_ID = "call%05d"  # nine letters and digits, which Mistral's templates demand
ARGUMENTS = {"value": "1"}, '{"value": "1"}'  # a call's arguments are an object; a few templates want its text
ANSWER = {"role": "assistant", "content": "Yes."}
# With thoughts: some templates put an empty thought into the last turn only.
CALLING = {"role": "assistant", "content": "", "reasoning_content": "Yes."}
DIFFERENT = "it renders earlier turns differently once the message follows"


class MessageEncoder:
    """Encodes prompts and added messages.

    The ids of an added message are a difference: the template renders a short conversation with it and without it, and
    what the longer one has more are its ids, after the separator that follows the end of a turn, which the model does
    not generate. So the ids do not depend on the conversation, and the ids of earlier turns never change.

    Args:
        tokenizer: a tokenizer with a chat template.
        stop_ids: ids that end a generated turn.
        template_kwargs: further arguments of the template (data.apply_chat_template_kwargs).
    """

    def __init__(self, tokenizer: Any, stop_ids: Collection[int], **template_kwargs: Any) -> None:
        self.tokenizer, self.stop_ids, self.kwargs = tokenizer, set(stop_ids), template_kwargs
        self._systems: list[list[dict[str, Any]]] = [[SYSTEM], []]  # some templates refuse a system message

    def prompt(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:  # fmt: skip
        """The ids of a prompt, up to where the model continues.

        Arguments of calls are objects, and are given as text to a template that raises an error for them.
        """
        settings = {"add_generation_prompt": add_generation_prompt}
        try:
            return self._render(messages, tools, **settings)
        except ChatTemplateError:
            as_text = [_with_text_arguments(message) for message in messages]
            if as_text == messages:
                raise
            return self._render(as_text, tools, **settings)

    def added(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True, after: int | None = None,
    ) -> list[int]:  # fmt: skip
        """The ids of messages after a generated turn, up to where the model continues.

        The messages are all of role "tool", after a turn with calls, or of another role. `after`: the last id that was
        generated, for templates whose messages begin with the stop token of the turn before; None for the right one.
        Raises ValueError if the template does not allow for it: it refuses them, changes earlier turns, or ends a turn
        with no token of `stop_ids`.
        """
        role = messages[0]["role"]
        if role == "tool":
            messages = [{"tool_call_id": CALL_ID % i, **message} for i, message in enumerate(messages)]
            numbers = sorted({len(messages), 1}, reverse=True)  # some templates allow one call per turn
            bases = [[USER, {**CALLING, "tool_calls": [_call_of(message, arguments) for message in messages[:n]]}]
                     for n in numbers for arguments in ARGUMENTS]  # fmt: skip
        else:
            bases = [[USER, ANSWER], [USER]]  # some templates take the thoughts out of a turn once a user follows
        problem = ""
        for system in self._systems:
            for base in bases:
                ids, reason = self._difference([*system, *base], messages, tools, add_generation_prompt, after)
                if ids is not None:
                    self._systems = [system]
                    return ids
                problem = problem or reason
        raise ValueError(f"messages of role {role!r} cannot be added by the chat template: {problem}")

    def without_separator(self, ids: list[int]) -> list[int]:
        """Ids without the space after the last turn's end, which belongs to the next message: no model generates it."""
        end = self._end(ids)
        return ids if end is None else ids[: end + 1]

    def _end(self, ids: list[int]) -> int | None:
        """Where the last turn's stop token is; None if a turn without one follows."""
        end = next((i for i in reversed(range(len(ids))) if ids[i] in self.stop_ids), None)
        unended = end is None or self.tokenizer.decode(ids[end + 1 :], skip_special_tokens=True).strip()
        return None if unended else end

    def deviation(
        self, ids: list[int], messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, *,
        mode: str = "strict", awaits_model: bool = False, cut: bool = False,
    ) -> str | None:  # fmt: skip
        """How the ids of a conversation differ from those of its messages, encoded at once; None if they do not.

        `mode` is multi_turn.tokenization_sanity_check_mode: ignore_strippable ignores whitespace around the differing
        parts, disable compares nothing. `cut`: the end of the last turn may be missing.
        """
        if mode == "disable":
            return None
        try:
            expected = self.prompt(messages, tools, add_generation_prompt=awaits_model)
        except ChatTemplateError as error:
            return f"the template does not render the finished messages: {error}"
        if messages[-1]["role"] == "assistant":
            unended = self._end(expected) is None and ids and ids[-1] in self.stop_ids
            expected = [*expected, ids[-1]] if unended else self.without_separator(expected)
            expected = expected[: len(ids)] if cut else expected
        if ids == expected:
            return None
        pairs = enumerate(zip(ids, expected, strict=False))
        start = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(expected)))
        ours, theirs = (self.tokenizer.decode(side[start:]) for side in (ids, expected))
        if mode == "ignore_strippable" and ours.strip() == theirs.strip():
            return None
        return (f"the ids differ from those of the finished messages, encoded at once, from position {start}: "
                f"{ours[:80]!r} against {theirs[:80]!r}. The generated ids are kept; with multi_turn.row_per_turn=true "
                "each turn follows what the template renders.")  # fmt: skip

    def _difference(
        self, base: list[dict[str, Any]], messages: list[dict[str, Any]], tools: Any, add_generation_prompt: bool,
        after: int | None,
    ) -> tuple[list[int] | None, str]:  # fmt: skip
        """The ids that follow the end of the base's last turn, or None and why there are none."""
        try:
            shorter = self._render(base, tools)
            longer = self._render([*base, *messages], tools, add_generation_prompt=add_generation_prompt)
        except ChatTemplateError as error:
            return None, str(error)
        if self._end(shorter) is None:
            # The last turn has no end, or what the model ends a turn with is the start of the next one.
            end = next((i for i in range(len(shorter), len(longer)) if longer[i] in self.stop_ids), None)
            if end is None or self.tokenizer.decode(longer[len(shorter) : end]).strip():
                return None, f"it ends the turn before with none of the stop tokens (ids {sorted(self.stop_ids)})"
            if longer[: len(shorter)] == shorter:
                return longer[end + (after in (None, longer[end])) :], ""
            return None, DIFFERENT
        ends = [i for i, token in enumerate(shorter) if token in self.stop_ids]
        # A template may end the text as well as the turn: then two stop tokens with nothing between them.
        text_ends_too = len(ends) > 1 and not self.tokenizer.decode(shorter[ends[-2] + 1 : ends[-1]]).strip()
        for end in ends[-2:] if text_ends_too else ends[-1:]:
            if longer[: end + 1] == shorter[: end + 1]:
                return longer[end + 1 :], ""
        return None, DIFFERENT

    def check(
        self, roles: Collection[str], tools: list[dict[str, Any]] | None = None, *, at_once: bool = False
    ) -> None:
        """Raise ValueError, naming the case, unless messages of these roles can be added, and appear in the text.

        `at_once`: messages are rendered with those before them (multi_turn.row_per_turn), and need not be what can be
        added to earlier ids.
        """
        for role in roles:
            for before in (["4217"], [])[role != "tool" :]:
                with_text, without = (self._checked(role, [*before, last], tools, at_once) for last in ("58", ""))
                if with_text == without:
                    raise ValueError(f"the chat template leaves messages of role {role!r} out")
            uncalled = None
            if at_once and role == "tool":
                with suppress(ChatTemplateError):  # many refuse an answer without a call
                    uncalled = self._checked(role, ["58"], tools, at_once, called=False)
            if uncalled == with_text:
                raise ValueError("the chat template leaves calls of tools out")

    def _checked(
        self, role: str, texts: list[str], tools: Any, at_once: bool, called: bool = True
    ) -> list[int]:
        messages = [{"role": role, "content": text} for text in texts]
        if not at_once:
            try:
                return self.added(messages, tools)
            except ValueError as error:
                with suppress(ChatTemplateError):
                    self._checked(role, texts, tools, at_once=True)
                    raise ValueError(f"{error}. Set rollout.multi_turn.row_per_turn=true for this template") from None
                raise
        if role != "tool":
            return self.prompt([USER, ANSWER, *messages], tools)
        messages = [{"tool_call_id": CALL_ID % i, "name": "tool", **message} for i, message in enumerate(messages)]
        calls = {"tool_calls": [_call_of(message, ARGUMENTS[0]) for message in messages]} if called else {}
        return self.prompt([USER, {**CALLING, **calls}, *messages], tools)

    def _render(self, messages: list[dict[str, Any]], tools: Any, **settings: Any) -> list[int]:
        text = render_chat(self.tokenizer, messages, tools=tools or None, **settings, **self.kwargs)
        text = text.encode("utf-8", "replace").decode()  # arguments of calls may have half a surrogate pair
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def _call_of(answer: dict[str, Any], arguments: Any) -> dict[str, Any]:
    """A call that a tool's message answers: templates show its name, or its id."""
    function = {"name": answer.get("name") or "tool", "arguments": arguments}
    return {"id": answer["tool_call_id"], "type": "function", "function": function}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [json.dumps(f["arguments"]) if isinstance(f["arguments"], dict) else f["arguments"] for f in functions]
    calls = [{**call, "function": {**call["function"], "arguments": text}}
             for call, text in zip(message["tool_calls"], texts, strict=True)]  # fmt: skip
    return {**message, "tool_calls": calls}
