"""The chat completions API: requests, replies and streams of a session."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from verl.agents.gateway.messages import RequestError, template_messages, template_tools
from verl.agents.gateway.session import Answer, Choice, Session
from verl.agents.tools.schemas import with_text_arguments
from verl.utils.problems import one_line

MOST_CHOICES = 64  # of a request; each is a generation of its own


def positive(body: dict[str, Any], *names: str) -> int | None:
    """The first of these fields that is set. RequestError unless it is a positive integer."""
    for name in names:
        if (value := body.get(name)) is not None:
            if type(value) is not int or value < 1:
                raise RequestError(f"{name}={value!r} must be a positive integer")
            return value
    return None


def check_format(settings: Any, where: str) -> None:
    """RequestError for other formats than text, since generation is not constrained; `where` names the field."""
    if isinstance(settings, dict) and settings.get("type", "text") != "text":
        raise RequestError(f"{where}.type={settings['type']!r}: rollout servers do not constrain replies; use text")


async def complete(session: Session, body: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """Generate for a body of POST /chat/completions: (the answer, fields of every object that is sent)."""
    _refuse_unsupported(session, body)
    n = positive(body, "n") or 1
    if n > MOST_CHOICES:
        raise RequestError(f"n={n} must be at most {MOST_CHOICES}")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise RequestError(f"stop={one_line(stop)} must be a text or a list of texts, none of them empty")
    tools = None if body.get("tool_choice") == "none" else template_tools(body.get("tools"))
    limit, messages = positive(body, "max_completion_tokens", "max_tokens"), template_messages(body.get("messages"))
    answer = await session.generate(messages, tools, n=n, max_tokens=limit, stop=tuple(stop))
    model = str(body.get("model") or "policy")
    return answer, {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": model}


def _refuse_unsupported(session: Session, body: dict[str, Any]) -> None:
    """RequestError for settings that rollout servers do not have; `stream_options` must be an object."""
    check_format(body.get("response_format"), "response_format")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RequestError(f'stream_options={one_line(options)} must be an object: {{"include_usage": true}}')
    if body.get("logprobs") and not session.sampling.get("logprobs"):
        raise RequestError("logprobs=true needs actor_rollout_ref.rollout.calculate_log_probs=true; or leave it out")
    if body.get("top_logprobs"):
        given = one_line(body["top_logprobs"])
        raise RequestError(f"top_logprobs={given}: only generated tokens have log-probs here; leave it out")


def usage(answer: Answer) -> dict[str, Any]:
    """The field usage: numbers of tokens of the prompt and of all replies."""
    generated = sum(len(choice.ids) for choice in answer.choices)
    return {
        "prompt_tokens": answer.prompt_tokens, "completion_tokens": generated,
        "total_tokens": answer.prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }  # fmt: skip


def calls_of(choice: Choice) -> list[dict[str, Any]]:
    """The calls of a reply, their arguments as JSON text."""
    return [with_text_arguments(call) for call in choice.message.get("tool_calls", ())]


def log_probs_of(choice: Choice, tokenizer: Any) -> dict[str, Any]:
    """The tokens of a reply with their log-probs."""
    entries = []
    for token, value in zip(choice.ids, choice.log_probs or (), strict=False):
        text = tokenizer.decode([token])
        entries.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": entries, "refusal": None}


def completion(answer: Answer, shared: dict[str, Any], body: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The object chat.completion, for an answer that is not streamed."""
    choices = []
    for index, choice in enumerate(answer.choices):
        calls = calls_of(choice)
        content = choice.message["content"] or (None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        if reasoning := choice.message.get("reasoning_content"):
            message["reasoning_content"] = reasoning
        log_probs = log_probs_of(choice, tokenizer) if body.get("logprobs") else None
        reason = choice.finish_reason
        choices.append({"index": index, "message": message, "finish_reason": reason, "logprobs": log_probs})
    return {**shared, "object": "chat.completion", "choices": choices, "usage": usage(answer)}


def chunks(answer: Answer, shared: dict[str, Any], body: dict[str, Any], tokenizer: Any) -> Iterator[dict[str, Any]]:
    """The objects chat.completion.chunk of a stream, which begins when the answer is complete."""
    shared = {**shared, "object": "chat.completion.chunk"}

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None, **more}
        return {**shared, "choices": [choice]}

    for index, choice in enumerate(answer.choices):
        yield chunk(index, {"role": "assistant", "content": ""})
        if reasoning := choice.message.get("reasoning_content"):
            yield chunk(index, {"reasoning_content": reasoning})
        log_probs = {"logprobs": log_probs_of(choice, tokenizer)} if body.get("logprobs") else {}
        if choice.message["content"] or log_probs:
            yield chunk(index, {"content": choice.message["content"]}, **log_probs)
        for number, call in enumerate(calls_of(choice)):
            yield chunk(index, {"tool_calls": [{"index": number, **call}]})
        yield chunk(index, {}, choice.finish_reason)
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**shared, "choices": [], "usage": usage(answer)}
