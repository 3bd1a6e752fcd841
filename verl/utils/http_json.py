"""Requests with JSON bodies to HTTP services: rollout servers, reward models, tools, sandboxes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import tenacity

MAX_RESPONSE_BYTES = 4 << 20
BUSY = (429, 500, 502, 503, 504)


class ServiceError(RuntimeError):
    """A service refused a request, or its reply is not what was requested. `status`: its HTTP status, if known."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ServiceBusy(ServiceError):
    """A service answered with one of the statuses BUSY: it may take the request later."""


class ServerUnreachable(RuntimeError):
    """A server did not answer, or failed with a request."""


@dataclass(frozen=True)
class Reply:
    """The reply to a request, whatever its status."""

    status: int
    content_type: str
    content: bytes

    @property
    def text(self) -> str:
        """The content as text."""
        return self.content.decode(errors="replace")


class HttpClient:
    """Requests over one pool of connections; all from one event loop.

    Args:
        token: sent as `Authorization: Bearer <token>`; "" for none.
        max_connections: connections that are open at the same time.
        connect_timeout: seconds to connect; None for no limit.
    """

    def __init__(self, token: str = "", max_connections: int = 100, connect_timeout: float | None = None) -> None:
        self.token, self.max_connections, self.connect_timeout = token, max_connections, connect_timeout
        self._session: aiohttp.ClientSession | None = None

    async def send(
        self, method: str, url: str, content: bytes | None = None, *, content_type: str = "application/json",
        timeout: float | None = None, max_bytes: int | None = None,
    ) -> Reply:  # fmt: skip
        """The reply to one request, within `timeout` seconds (None: no limit).

        Raises aiohttp.ClientError or TimeoutError if there is none, ServiceError if it is longer than `max_bytes`: the
        rest is not read.
        """
        if self._session is None:
            headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
            connector = aiohttp.TCPConnector(limit=self.max_connections)
            self._session = aiohttp.ClientSession(connector=connector, headers=headers, trust_env=False)
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=self.connect_timeout)
        headers = {"Content-Type": content_type}
        async with self._session.request(method, url, data=content, headers=headers, timeout=limits) as response:
            received = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                received += chunk
                if max_bytes is not None and len(received) > max_bytes:
                    raise ServiceError(f"{url} answered more than {max_bytes} bytes")
            return Reply(response.status, response.content_type, bytes(received))

    async def post_json(
        self, url: str, body: Any, timeout: float | None = None, max_bytes: int | None = MAX_RESPONSE_BYTES
    ) -> Any:
        """The decoded reply to a POST; see `send`. ServiceError for another status than 200 and for other than JSON."""
        reply = await self.send("POST", url, json.dumps(body).encode(), timeout=timeout, max_bytes=max_bytes)
        if reply.status != 200:
            kind = ServiceBusy if reply.status in BUSY else ServiceError
            raise kind(f"{url} answered {reply.status}: {reply.text[:200]}", reply.status)
        try:
            return json.loads(reply.content)
        except (ValueError, RecursionError) as error:
            raise ServiceError(f"{url} answered no JSON: {reply.text[:200]}") from error

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()


@tenacity.retry(
    retry=tenacity.retry_if_exception_type((ServiceBusy, aiohttp.ClientConnectionError)),
    stop=tenacity.stop_after_attempt(4), wait=tenacity.wait_exponential_jitter(0.2, max=5, jitter=0.2), reraise=True,
)  # fmt: skip
async def post_json(url: str, body: Any, timeout: float, max_bytes: int = MAX_RESPONSE_BYTES) -> Any:
    """`HttpClient.post_json` over a connection of its own, up to four times if the service is busy or unreachable."""
    async with HttpClient() as client:
        return await client.post_json(url, body, timeout, max_bytes)
