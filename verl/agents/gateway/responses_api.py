"""The responses API: requests, replies and streams of a session, as chat messages with other names."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from verl.agents.gateway.chat_api import calls_of, check_format, positive
from verl.agents.gateway.messages import RequestError, template_messages, template_tools
from verl.agents.gateway.session import Answer, Choice, Session
from verl.utils.problems import one_line


def _chat_messages(items: Any) -> list[dict[str, Any]]:
    """The input items of a request as messages of the chat completions API: one message for all items of a reply."""
    if not isinstance(items, str | list | None):
        raise RequestError(f"input={one_line(items)} must be a text or a list of items")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items or []
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        message = _message_of(item, i)
        if messages and _are_one_reply(messages[-1], message):  # reasoning after the first item is left out
            reply = messages[-1]
            reply["content"] = reply["content"] or message["content"]
            if "tool_calls" in message:
                reply["tool_calls"] = [*reply.get("tool_calls", ()), *message["tool_calls"]]
        else:
            messages.append(message)
    return messages


def _message_of(item: Any, i: int) -> dict[str, Any]:
    """Input item number i as a message of its own."""
    if not isinstance(item, dict):
        raise RequestError(f"input[{i}]={one_line(item)} must be an object")
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    if kind == "reasoning":
        field = "content" if item.get("content") else "summary"
        parts = item.get(field) or []
        try:
            text = "\n".join(part.get("text", "") for part in parts)
        except (AttributeError, TypeError):
            raise RequestError(f"input[{i}].{field}={one_line(parts)} must be a list of parts with a text") from None
        return {"role": "assistant", "content": None, "reasoning_content": text}
    known = "message, function_call, function_call_output and reasoning are"
    raise RequestError(f"input[{i}].type={kind!r} is not supported: {known}")


def _are_one_reply(last: dict[str, Any], message: dict[str, Any]) -> bool:
    """Whether two messages are items of one reply, which has reasoning, a text and calls in this order."""
    if not message["role"] == last["role"] == "assistant":
        return False
    return not message["content"] or not (last["content"] or last.get("tool_calls"))


async def respond(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    """Answer a body of POST /responses with the response object.

    The session remembers each conversation by the id of its last response, for `previous_response_id`. Raises
    RequestError for ids of other sessions.
    """
    settings = body.get("text") or {}
    if not isinstance(settings, dict):
        raise RequestError(f'text={one_line(settings)} must be an object: {{"format": {{"type": "text"}}}}')
    check_format(settings.get("format"), "text.format")
    previous = body.get("previous_response_id")
    if previous is not None and (not isinstance(previous, str) or previous not in session.responses):
        raise RequestError(f"previous_response_id={previous!r} is not a response of this session", 404)
    history = [*session.responses.get(previous, ()), *_chat_messages(body.get("input"))]
    # Not remembered: instructions hold for one request only.
    system = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    tools, limit = _tools_of(body), positive(body, "max_output_tokens")
    answer = await session.generate(template_messages([*system, *history]), tools, max_tokens=limit)
    response = _response(body, answer)
    (choice,) = answer.choices
    # Without reasoning, which does not count when conversations are compared.
    reply = {"role": "assistant", "content": choice.message["content"], "tool_calls": calls_of(choice)}
    session.responses[response["id"]] = [*history, reply]
    return response


def _tools_of(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The functions of a request; this API has their fields beside the type, the chat API below "function"."""
    listed = body.get("tools") or []
    if not isinstance(listed, list):
        raise RequestError(f"tools={one_line(listed)} must be a list of functions")
    tools = [{**tool, "function": tool} if isinstance(tool, dict) else tool for tool in listed]
    return None if body.get("tool_choice") == "none" else template_tools(tools)


def _response(body: dict[str, Any], answer: Answer) -> dict[str, Any]:
    """The response object for an answer of one choice."""
    (choice,) = answer.choices
    number, status, incomplete = uuid4().hex, "completed", None
    if choice.finish_reason == "length":
        status, incomplete = "incomplete", {"reason": "max_output_tokens"}
    return {
        "id": f"resp_{number}", "object": "response", "created_at": time.time(),
        "model": str(body.get("model") or "policy"), "status": status, "incomplete_details": incomplete, "error": None,
        "output": _output_items(choice, number, status), "instructions": body.get("instructions"),
        "previous_response_id": body.get("previous_response_id"), "metadata": {},
        "parallel_tool_calls": True, "tool_choice": body.get("tool_choice") or "auto", "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": answer.prompt_tokens, "output_tokens": len(choice.ids),
            "total_tokens": answer.prompt_tokens + len(choice.ids),
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip


def _output_items(choice: Choice, number: str, status: str) -> list[dict[str, Any]]:
    """The items of a reply: its reasoning, its text, its calls."""
    items: list[dict[str, Any]] = []
    calls = calls_of(choice)
    if reasoning := choice.message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": content, "status": status})
    if choice.message["content"] or not calls:
        content = [{"type": "output_text", "text": choice.message["content"], "annotations": [], "logprobs": []}]
        items.append({"type": "message", "id": f"msg_{number}", "role": "assistant", "status": status,
                      "content": content})  # fmt: skip
    for i, call in enumerate(calls):
        items.append({"type": "function_call", "id": f"fc_{number}_{i}", "call_id": call["id"], "status": status,
                      **call["function"]})  # fmt: skip
    return items


def events(response: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a stream of `response`, which is complete already; the server adds their sequence numbers."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        place = {"item_id": item["id"], "output_index": index}
        empty = {"content": []} if "content" in item else {"arguments": ""}
        added = {**item, "status": "in_progress", **empty}
        yield {"type": "response.output_item.added", "output_index": index, "item": added}
        if item["type"] == "function_call":
            name = "response.function_call_arguments"
            yield {"type": f"{name}.delta", **place, "delta": item["arguments"]}
            yield {"type": f"{name}.done", **place, "name": item["name"], "arguments": item["arguments"]}
        for part in item.get("content", ()):
            part_place = {**place, "content_index": 0}  # each item has one part
            name = "response.output_text" if part["type"] == "output_text" else "response.reasoning_text"
            logprobs = {"logprobs": []} if part["type"] == "output_text" else {}
            yield {"type": "response.content_part.added", **part_place, "part": {**part, "text": ""}}
            yield {"type": f"{name}.delta", **part_place, "delta": part["text"], **logprobs}
            yield {"type": f"{name}.done", **part_place, "text": part["text"], **logprobs}
            yield {"type": "response.content_part.done", **part_place, "part": part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    last = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
    yield {"type": last, "response": response}
