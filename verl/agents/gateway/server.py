"""The HTTP server of the gateway, in the event loop of an agent loop worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Iterable
from typing import Any

from aiohttp import web

from verl.agents.gateway import chat_api, responses_api
from verl.agents.gateway.messages import RequestError, is_finite_number
from verl.agents.gateway.session import Session
from verl.utils.http_json import ServerUnreachable

MOST_BYTES = 4 << 20  # of a request
SESSION = web.RequestKey("session", Session)


class Gateway:
    """Serves the sessions that are open, each under a token of its own, on a free port of 127.0.0.1.

    POST /v1/chat/completions and /v1/responses are those of OpenAI's API, GET /v1/models lists one model. POST
    /v1/reward {"reward": number} is the reward of the session; the last one counts. Every request needs the header
    `Authorization: Bearer <token>`. The token alone says which session is meant, so that a program cannot reach another
    program's.

    It listens while at least one session is open.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._lock = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self.url = ""

    @contextlib.asynccontextmanager
    async def serve(self, session: Session) -> AsyncIterator[tuple[str, str]]:
        """(base URL, token) of a session, until the context ends."""
        token = secrets.token_urlsafe(24)
        async with self._lock:
            if self._runner is None:
                await self._start()
            self._sessions[token] = session
        try:
            yield self.url, token
        finally:
            async with self._lock:
                del self._sessions[token]
                if not self._sessions:
                    runner, self._runner = self._runner, None
                    await runner.cleanup()

    async def _start(self) -> None:
        """Listen on a free port of 127.0.0.1."""
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._with_session])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/v1/reward", self._reward)
        app.router.add_get("/v1/models", self._models)
        # A client that has gone gets no turn: its retry would record a second one.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._runner, self.url = runner, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    @web.middleware
    async def _with_session(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Find the session of the request's token, or answer 401; errors of handlers become OpenAI's error objects."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(token) if scheme.lower() == "bearer" else None
        if session is None:
            return _error("the token is not that of an open session", 401, "invalid_api_key")
        request[SESSION] = session
        try:
            return await handler(request)
        except RequestError as error:
            return _error(str(error), error.status, error.code)
        except ServerUnreachable as error:
            return _error(str(error), 503)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, body = request[SESSION], await _body(request)
        answer, shared = await chat_api.complete(session, body)
        arguments = (answer, shared, body, session.settings.encoder.tokenizer)
        if body.get("stream"):
            events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chat_api.chunks(*arguments)]
            return await _stream(request, [*events, "data: [DONE]\n\n"])
        return web.json_response(chat_api.completion(*arguments))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        session, body = request[SESSION], await _body(request)
        response = await responses_api.respond(session, body)
        if body.get("stream"):
            events = []
            for number, event in enumerate(responses_api.events(response)):
                data = json.dumps({**event, "sequence_number": number})
                events.append(f"event: {event['type']}\ndata: {data}\n\n")
            return await _stream(request, events)
        return web.json_response(response)

    async def _reward(self, request: web.Request) -> web.Response:
        reward = (await _body(request)).get("reward")
        if not is_finite_number(reward):
            raise RequestError(f"reward={reward!r} must be a finite number")
        request[SESSION].reward = float(reward)
        return web.json_response({"reward": float(reward)})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "verl"}
        return web.json_response({"object": "list", "data": [model]})


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _error(message: str, status: int, code: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "param": None, "code": code}}, status=status)


async def _stream(request: web.Request, events: Iterable[str]) -> web.StreamResponse:
    """Server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for event in events:
        await response.write(event.encode())
    await response.write_eof()
    return response
