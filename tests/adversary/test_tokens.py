"""Headers that do not have the token of a reward server, on any path: answered 401, and nothing is passed on.

To add a header or a path, append it.
"""

import asyncio
import itertools

import pytest

from verl.rollout.vllm_rollout.openai_server import TOKEN_VARIABLE, TokenGuard

TOKEN = "t0k3n"
HEADERS = [
    [], [(b"authorization", b"")], [(b"authorization", b"Bearer")], [(b"authorization", b"Bearer ")],
    [(b"authorization", b"bearer t0k3n")], [(b"authorization", b"Bearer t0k3")], [(b"authorization", b"Bearer t0k3n ")],
    [(b"authorization", b"Bearer t0k3nn")], [(b"authorization", b"Basic t0k3n")], [(b"authorization", b"t0k3n")],
    [(b"authorization", "Bearer é".encode())], [(b"authorization", b"Bearer \xff\x00")], [(b"x-api-key", b"t0k3n")],
    [(b"authorization", b"Bearer t0k3n"), (b"authorization", b"Bearer x")], [(b"authorization", b"Bearer None")],
    [(b"authorization", b"Bearer " + b"t" * 100_000)], [(b"cookie", b"authorization=Bearer t0k3n")],
]  # fmt: skip
PATHS = ["/", "", "/v1/completions", "/classify", "/pause", "/metrics", "/health/", "/health/../classify", "/HEALTH",
         "//health", "/v1/health", "/docs", "/openapi.json", "/invocations", "/%68ealth"]  # fmt: skip


def answers(monkeypatch, scope):
    """What a guarded server sends, and whether it got the request."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    sent, passed = [], []

    async def app(scope, receive, send):
        passed.append(scope)

    async def send(message):
        sent.append(message)

    asyncio.run(TokenGuard(app)(scope, None, send))
    return sent, passed


@pytest.mark.parametrize("headers", HEADERS, ids=range(len(HEADERS)))
def test_a_request_without_the_token_is_refused(monkeypatch, headers):
    for method, path in itertools.product(("GET", "POST", "OPTIONS"), PATHS):
        sent, passed = answers(monkeypatch, {"type": "http", "method": method, "path": path, "headers": headers})
        assert sent[0]["status"] == 401 and not passed, (method, path)


@pytest.mark.parametrize("headers", HEADERS, ids=range(len(HEADERS)))
def test_a_websocket_without_the_token_is_closed(monkeypatch, headers):
    sent, passed = answers(monkeypatch, {"type": "websocket", "path": "/v1/realtime", "headers": headers})
    assert sent == [{"type": "websocket.close", "code": 1008}] and not passed


def test_requests_with_the_token_health_and_the_start_pass(monkeypatch):
    right = {"type": "http", "method": "POST", "path": "/classify", "headers": [(b"authorization", b"Bearer t0k3n")]}
    for scope in (right, {**right, "path": "/health", "headers": []}, {"type": "lifespan"}):
        sent, passed = answers(monkeypatch, scope)
        assert passed == [scope] and not sent
