"""Chooses a server for each request."""

import time
from collections.abc import Collection

from verl.utils.http_json import ServerUnreachable


class RequestRouter:
    """Chooses the server with the fewest requests in flight, the first among equals. Servers are numbered from 0.

    Requests of one conversation stay with their server, whose prefix cache has it, unless that server runs more than
    `margin` requests more than the one with the fewest.

    A server that fails is not used until `reset`. With `backoff_s` it is used last instead: for `backoff_s` seconds,
    doubled with each consecutive failure up to `max_backoff_s`. Failures during this time do not extend it.

    Args:
        servers: number of servers.
        margin: see above.
        max_cache_size: conversations whose server is remembered.
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
        least = min(candidates, key=lambda i: (max(0.0, self._backoff_until[i] - now), self.running[i]))
        server = least
        if conversation is not None:
            previous = self.server_of.pop(conversation, least)
            if previous in candidates and self.running[previous] <= self.running[least] + self.margin:
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
        """Count no request as running, and with `lost` use all servers again; for requests of workers that died.

        Requests that are running are not counted, and when they end they lower the counts of newer ones: counts are
        exact again when all of them have ended.
        """
        self.running = [0] * len(self.running)
        if lost:
            self.lost.clear()
