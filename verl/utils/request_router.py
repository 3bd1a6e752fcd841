"""Chooses a server for each request; and one address in front of several servers."""

import asyncio
import threading
import time
from collections.abc import Collection

from aiohttp import ClientConnectionError, ClientError, web

from verl.utils.http_json import HttpClient, ServerUnreachable

_SIZE_LIMIT = 64 << 20  # bytes of a request that the proxy forwards


class RequestRouter:
    """Chooses the server with the fewest requests in flight, the first among equals. Servers are numbered from 0.

    Requests of one conversation stay with their server, whose prefix cache has it, unless that server runs more than
    `margin` requests more than the one with the fewest. A server that fails is not used until `reset`.

    Args:
        max_cache_size: conversations whose server is remembered.
        backoff_s: seconds for which a server that fails is used last, instead of not at all; each consecutive failure
            doubles them, up to `max_backoff_s`. Failures during this time do not extend it.
    """

    def __init__(
        self, servers: int, margin: int = 2, max_cache_size: int = 10000, backoff_s: float | None = None,
        max_backoff_s: float = 600.0,
    ) -> None:  # fmt: skip
        self.running = [0] * servers
        self.lost: set[int] = set()
        self.margin, self.max_cache_size = margin, max_cache_size
        self.server_of: dict[str, int] = {}
        self.backoff_s, self.max_backoff_s = backoff_s, max_backoff_s
        self.failures = [0] * servers  # consecutive
        self._backoff_until = [0.0] * servers  # monotonic seconds

    def acquire(self, conversation: str | None = None, exclude: Collection[int] = (), weight: int = 1) -> int:
        """The server for a request, which counts as `weight` running ones until `release`.

        Servers in `exclude` (those of earlier attempts) are chosen only if there is no other. ServerUnreachable if all
        servers have failed.
        """
        alive = [i for i in range(len(self.running)) if i not in self.lost]
        if not alive:
            raise ServerUnreachable("no rollout server is left")
        now = time.monotonic()
        candidates = [i for i in alive if i not in exclude] or alive
        backoff = [max(0.0, until - now) for until in self._backoff_until]
        server = best = min(candidates, key=lambda i: (backoff[i], self.running[i]))
        if conversation is not None:
            previous = self.server_of.pop(conversation, best)
            if previous in candidates and self.running[previous] <= self.running[best] + self.margin:
                server = previous
            self.server_of[conversation] = server  # the newest last
            if len(self.server_of) > self.max_cache_size:
                del self.server_of[next(iter(self.server_of))]
        self.running[server] += weight
        return server

    def release(self, server: int, lost: bool = False, weight: int = 1) -> None:
        """A request of `acquire` has ended; `lost`: the server failed."""
        self.running[server] = max(0, self.running[server] - weight)
        if not lost:
            self.failures[server], self._backoff_until[server] = 0, 0.0
        elif self.backoff_s is None:
            self.lost.add(server)
        elif (now := time.monotonic()) >= self._backoff_until[server]:
            seconds = self.backoff_s * 2.0 ** self.failures[server]
            self.failures[server] += 1
            self._backoff_until[server] = now + min(seconds, max(self.max_backoff_s, self.backoff_s))

    def reset(self, lost: bool = True) -> None:
        """Count no request as running, since workers that died release none; with `lost` use failed servers again.

        A request from before that still runs lowers, when it ends, the count of newer ones, but never below 0.
        """
        self.running = [0] * len(self.running)
        if lost:
            self.lost.clear()


class RequestProxy:
    """Forwards HTTP requests to the least busy of several servers, from a thread of this process.

    Args:
        tokens: the bearer token of each server, by its address ("host:port").
        timeout: seconds of a request.
    """

    def __init__(self, tokens: dict[str, str], timeout: float = 600.0) -> None:
        self._addresses, self._timeout = list(tokens), timeout
        self._clients = [HttpClient(token) for token in tokens.values()]
        self._router = RequestRouter(len(tokens))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="request-proxy")
        self._thread.start()
        self.address = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    async def _listen(self) -> str:
        app = web.Application(client_max_size=_SIZE_LIMIT)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def _forward(self, request: web.Request) -> web.Response:
        body = await request.read()
        tried, problem = [], ""
        for _ in self._clients:
            server = self._router.acquire(exclude=tried)
            tried.append(server)
            url = f"http://{self._addresses[server]}{request.rel_url}"
            try:
                reply = await self._clients[server].send(
                    request.method, url, body, content_type=request.content_type, timeout=self._timeout
                )
                return web.Response(status=reply.status, body=reply.content, content_type=reply.content_type)
            except (ClientError, TimeoutError) as error:
                problem = f"{self._addresses[server]}: {type(error).__name__}: {error}"
                # A server that refuses connections is always the least busy one, so the next one is asked.
                if not isinstance(error, ClientConnectionError):
                    break
            finally:
                self._router.release(server)
        return web.Response(status=502, text=problem)

    def close(self) -> None:
        """Stop listening."""

        async def end() -> None:
            await self._runner.cleanup()
            for client in self._clients:
                await client.close()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
