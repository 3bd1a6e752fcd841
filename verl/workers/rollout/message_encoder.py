"""Token ids of messages that are added to a conversation, by the chat template of the tokenizer."""

from collections.abc import Collection
from typing import Any

from verl.utils.chat_template import ChatTemplateError, render_chat

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
USER = {"role": "user", "content": "Hello."}
CALL = {"id": "call_0", "type": "function", "function": {"name": "tool", "arguments": {"value": "1"}}}
ANSWER = {"role": "assistant", "content": "Yes."}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}


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
        template does not allow for it: it changes earlier turns, or ends the model's turn with no token of `stop_ids`.
        """
        role = messages[0]["role"]
        last = {**CALLING, "tool_calls": [CALL] * len(messages)} if role == "tool" else ANSWER
        error: Exception | None = None
        for system in self._systems:
            base = [*system, USER, last]
            try:
                shorter = self._render(base, tools)
                longer = self._render([*base, *messages], tools, add_generation_prompt=add_generation_prompt)
            except ChatTemplateError as raised:
                error = raised
                continue
            self._systems = [system]
            break
        else:
            raise ValueError(f"the chat template cannot render messages of role {role!r} after an answer: {error}")
        ends = [i for i, token in enumerate(shorter) if token in self.stop_ids]
        if not ends:
            stops = sorted(self.stop_ids)
            raise ValueError(f"the chat template ends the model's turn with none of the stop tokens (ids {stops})")
        # A template may end the text as well as the turn: then two stop tokens with nothing between them.
        text_ends_too = len(ends) > 1 and not self.tokenizer.decode(shorter[ends[-2] + 1 : ends[-1]]).strip()
        for end in ends[-2:] if text_ends_too else ends[-1:]:
            if longer[: end + 1] == shorter[: end + 1]:
                return longer[end + 1 :]
        raise ValueError(f"the chat template renders earlier turns differently once a message of role {role!r} follows")

    def check(self, roles: Collection[str], tools: list[dict[str, Any]] | None = None) -> None:
        """Raise ValueError, naming the case, unless messages of these roles can be added."""
        for role in roles:
            self.added([{"role": role, "content": "1"}], tools)

    def _render(self, messages: list[dict[str, Any]], tools: Any, **settings: Any) -> list[int]:
        text = render_chat(self.tokenizer, messages, tools=tools or None, **settings, **self.kwargs)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]
