"""Token ids of messages that are added to a conversation, by the chat template of the tokenizer."""

from collections.abc import Collection
from typing import Any

from verl.utils.chat_template import ChatTemplateError, render_chat

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
USER = {"role": "user", "content": "Hello."}
CALL_ID = "call00000"  # nine letters and digits, which Mistral's templates demand
# A call's arguments are an object; a few templates want its text.
CALLS = [
    {"id": CALL_ID, "type": "function", "function": {"name": "tool", "arguments": arguments}}
    for arguments in ({"value": "1"}, '{"value": "1"}')
]
ANSWER = {"role": "assistant", "content": "Yes."}
# With thoughts: some templates put an empty thought into the last turn only.
CALLING = {"role": "assistant", "content": "", "reasoning_content": "Yes."}


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
        """The ids of a prompt, up to where the model continues."""
        return self._render(messages, tools, add_generation_prompt=add_generation_prompt)

    def added(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:  # fmt: skip
        """The ids of messages after a generated turn, up to where the model continues.

        The messages are all of role "tool", after a turn with calls, or of another role. Raises ValueError if the
        template does not allow for it: it refuses them, changes earlier turns, or ends a turn with no token of
        `stop_ids`.
        """
        role = messages[0]["role"]
        if role == "tool":
            messages = [{"tool_call_id": CALL_ID, **message} for message in messages]
            numbers = sorted({len(messages), 1}, reverse=True)  # some templates allow one call per turn
            bases = [[USER, {**CALLING, "tool_calls": [call] * n}] for n in numbers for call in CALLS]
        else:
            bases = [[USER, ANSWER], [USER]]  # some templates take the thoughts out of a turn once a user follows
        problem = ""
        for system in self._systems:
            for base in bases:
                ids, reason = self._difference([*system, *base], messages, tools, add_generation_prompt)
                if ids is not None:
                    self._systems = [system]
                    return ids
                problem = problem or reason
        raise ValueError(f"messages of role {role!r} cannot be added by the chat template: {problem}")

    def without_separator(self, ids: list[int]) -> list[int]:
        """Ids up to the last turn end; what follows it belongs to the next message, as a model does not generate it."""
        ends = [i for i, token in enumerate(ids) if token in self.stop_ids]
        return ids[: ends[-1] + 1] if ends else ids

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
            expected = self.without_separator(expected)
            expected = expected[: len(ids)] if cut else expected
        if ids == expected:
            return None
        pairs = enumerate(zip(ids, expected, strict=False))
        start = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(expected)))
        ours, theirs = (self.tokenizer.decode(side[start:]) for side in (ids, expected))
        if mode == "ignore_strippable" and ours.strip() == theirs.strip():
            return None
        return (f"the ids differ from those of the finished messages, encoded at once, from position {start}: "
                f"{ours[:80]!r} against {theirs[:80]!r}. The generated ids are kept.")  # fmt: skip

    def _difference(
        self, base: list[dict[str, Any]], messages: list[dict[str, Any]], tools: Any, add_generation_prompt: bool
    ) -> tuple[list[int] | None, str]:
        """The ids that follow the end of the base's last turn, or None and why there are none."""
        try:
            shorter = self._render(base, tools)
            longer = self._render([*base, *messages], tools, add_generation_prompt=add_generation_prompt)
        except ChatTemplateError as error:
            return None, str(error)
        ends = [i for i, token in enumerate(shorter) if token in self.stop_ids]
        if not ends or self.tokenizer.decode(shorter[ends[-1] + 1 :], skip_special_tokens=True).strip():
            return None, f"it ends the turn before with none of the stop tokens (ids {sorted(self.stop_ids)})"
        # A template may end the text as well as the turn: then two stop tokens with nothing between them.
        text_ends_too = len(ends) > 1 and not self.tokenizer.decode(shorter[ends[-2] + 1 : ends[-1]]).strip()
        for end in ends[-2:] if text_ends_too else ends[-1:]:
            if longer[: end + 1] == shorter[: end + 1]:
                return longer[end + 1 :], ""
        return None, "it renders earlier turns differently once the message follows"

    def check(self, roles: Collection[str], tools: list[dict[str, Any]] | None = None) -> None:
        """Raise ValueError, naming the case, unless messages of these roles can be added, and appear in the text."""
        for role in roles:
            for before in ([], ["4217"])[: 1 + (role == "tool")]:
                with_text, without = (
                    self.added([{"role": role, "content": text} for text in [*before, last]], tools)
                    for last in ("58", "")
                )
                if with_text == without:
                    raise ValueError(f"the chat template leaves messages of role {role!r} out")

    def _render(self, messages: list[dict[str, Any]], tools: Any, **settings: Any) -> list[int]:
        text = render_chat(self.tokenizer, messages, tools=tools or None, **settings, **self.kwargs)
        text = text.encode("utf-8", "replace").decode()  # arguments of calls may have half a surrogate pair
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]
