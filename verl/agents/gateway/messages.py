"""Messages of the chat completions API, and what chat templates take instead."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from typing import Any

from verl.agents.tools.schemas import decode_arguments

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class RequestError(ValueError):
    """A request that cannot be answered; `status` and `code` are those of the reply."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def is_finite_number(value: Any) -> bool:
    """Whether a value of JSON can be a reward."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def template_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a request as chat templates take them.

    Contents are texts, arguments of calls are objects where they are valid JSON, `developer` is `system`, and messages
    of tools have the name of their tool. Raises RequestError for anything that is not text.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message")
    names: dict[str, str] = {}  # of the tools, by the id of the call
    converted = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise RequestError(f"messages[{i}].role must be one of {', '.join(ROLES)}")
        role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
        made: dict[str, Any] = {"role": role, "content": _text(message.get("content"), f"messages[{i}].content")}
        if reasoning := message.get("reasoning_content"):
            made["reasoning_content"] = _text(reasoning, f"messages[{i}].reasoning_content")
        if role == "assistant" and message.get("tool_calls"):
            made["tool_calls"] = [_call(call, f"messages[{i}].tool_calls") for call in message["tool_calls"]]
            names |= {call["id"]: call["function"]["name"] for call in made["tool_calls"]}
        if role == "tool":
            made["tool_call_id"] = str(message.get("tool_call_id") or "")
            name = message.get("name") or names.get(made["tool_call_id"])
            if name:
                made["name"] = name
        converted.append(made)
    return converted


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text", part.get("refusal")) if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{where} has a part that is not text; rollout servers take text only")
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} has a call without function.name")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = decode_arguments(arguments)
    named = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": named}


def template_tools(tools: Any) -> list[dict[str, Any]] | None:
    """The tools of a request as chat templates take them. RequestError for another kind of tool than a function."""
    if not tools:
        return None
    made = []
    for i, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{i}] must have type=function and function.name")
        known = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
        defaults = {"description": "", "parameters": {"type": "object", "properties": {}}}
        made.append({"type": "function", "function": defaults | known})
    return made


def conversation_keys(tools: Any, messages: list[dict[str, Any]]) -> list[bytes]:
    """The digests of a conversation (see `template_messages`) before its first message, and after each of them."""
    keys = [digest_of(json.dumps(tools, sort_keys=True).encode())]
    for message in messages:
        keys.append(key_after(keys[-1], message))
    return keys


def key_after(key: bytes, message: dict[str, Any]) -> bytes:
    """The digest of a conversation with one more message; reasoning and names do not count.

    Clients repeat the messages that they got, but many leave such fields out.
    """
    counted = [message.get(name) or None for name in ("role", "content", "tool_calls", "tool_call_id")]
    return digest_of(key + json.dumps(counted, sort_keys=True).encode())


def digest_of(data: bytes) -> bytes:
    """16 bytes that stand for the data."""
    return hashlib.blake2b(data, digest_size=16).digest()
