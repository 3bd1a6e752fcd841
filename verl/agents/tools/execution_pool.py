"""Bounds how many calls of a tool run at once, in one process and in a Ray cluster."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from enum import Enum
from typing import Any, TypeVar

from verl.utils.threads import in_thread

T = TypeVar("T")
_RATE_LIMIT, _NAME = 10, "tool-rate-limiter"
_LEASE_S = 600.0  # after which a token that was never released is free again


class PoolMode(Enum):
    """Where calls run: in threads; processes are not supported."""

    ThreadMode = 1
    ProcessMode = 2


class TokenBucketWorker:
    """A semaphore of `rate_limit` tokens, one for each call that runs: it bounds calls at once, not calls per second.

    A token comes back `lease` seconds after it was given, even if its call still runs: the holder may be gone.
    """

    def __init__(self, rate_limit: int, lease: float = _LEASE_S):
        if rate_limit < 1:
            raise ValueError(f"rate_limit={rate_limit} must be at least 1")
        self.rate_limit, self.lease = rate_limit, lease
        self._held: dict[int, float] = {}  # token -> when it comes back
        self._last_token = 0
        self._freed = asyncio.Event()

    async def acquire(self) -> int:
        """A token, as soon as one is free."""
        while self.get_current_count() >= self.rate_limit:
            self._freed.clear()
            next_end = min(self._held.values())
            with contextlib.suppress(TimeoutError):  # a lease ran out: get_current_count drops its token
                await asyncio.wait_for(self._freed.wait(), max(0.01, next_end - time.monotonic()))
        self._last_token += 1
        self._held[self._last_token] = time.monotonic() + self.lease
        return self._last_token

    async def release(self, token: int | None = None) -> None:
        """Give a token back; without a number the oldest one."""
        self._held.pop(min(self._held, default=0) if token is None else token, None)  # no token is 0
        self._freed.set()

    def get_current_count(self) -> int:
        """Tokens that are held."""
        now = time.monotonic()
        self._held = {token: end for token, end in self._held.items() if end > now}
        return len(self._held)


class ExecutionWorker:
    """Runs calls: functions in threads, coroutine functions in the event loop.

    At most `num_workers` of this object run at once, and `rate_limit` of all objects of the same `name` in the Ray
    cluster; without Ray, `rate_limit` of this object. The limit that was given first counts. With Ray the tokens are
    kept by a detached actor: it outlives its creator.
    """

    def __init__(
        self, enable_global_rate_limit: bool = True, rate_limit: int = _RATE_LIMIT, *, num_workers: int = 10,
        name: str = _NAME,
    ):  # fmt: skip
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers} is too small; use 1 or more")
        self._slots = asyncio.Semaphore(num_workers)
        self._acquire = self._release = None
        if enable_global_rate_limit:
            self._acquire, self._release = _bucket(rate_limit, name)

    def ping(self) -> bool:
        """True; verl's callers wait for it."""
        return True

    @contextlib.asynccontextmanager
    async def _token(self) -> AsyncIterator[None]:
        """Holds a token of the bucket; one that is granted after its call was cancelled is given back, too."""

        def give_back(granted: asyncio.Future) -> None:
            if not granted.cancelled() and granted.exception() is None:
                asyncio.ensure_future(self._release(granted.result()))

        granted = asyncio.ensure_future(self._acquire())
        try:
            token = await asyncio.shield(granted)
        except asyncio.CancelledError:
            granted.add_done_callback(give_back)
            raise
        try:
            yield
        finally:
            await asyncio.shield(self._release(token))

    async def execute(self, fn: Callable[..., T], *fn_args: Any, **fn_kwargs: Any) -> T:
        """The result of `fn`, which is awaited if it is a coroutine function; its exceptions pass through."""
        async with self._slots, contextlib.nullcontext() if self._acquire is None else self._token():
            if asyncio.iscoroutinefunction(fn):
                return await fn(*fn_args, **fn_kwargs)
            return await in_thread(fn, *fn_args, **fn_kwargs)


def _bucket(rate_limit: int, name: str) -> tuple[Callable, Callable]:
    """acquire and release of the bucket `name` in the Ray cluster, or of a new one without Ray."""
    import ray

    bucket = TokenBucketWorker(rate_limit)  # a wrong limit is refused here, not in the actor
    if not ray.is_initialized():
        return bucket.acquire, bucket.release
    actor = ray.remote(TokenBucketWorker).options(
        name=name, namespace="verl", get_if_exists=True, lifetime="detached", num_cpus=0, max_concurrency=10_000
    ).remote(rate_limit)  # fmt: skip
    return actor.acquire.remote, actor.release.remote


def init_execution_pool(
    num_workers: int, enable_global_rate_limit: bool = True, rate_limit: int = _RATE_LIMIT,
    mode: PoolMode = PoolMode.ThreadMode, name: str = _NAME,
) -> ExecutionWorker:  # fmt: skip
    """A pool of this process; see ExecutionWorker. ValueError for another mode than threads."""
    if mode != PoolMode.ThreadMode:
        raise ValueError(f"mode={mode} is not supported; use PoolMode.ThreadMode")
    return ExecutionWorker(enable_global_rate_limit, rate_limit, num_workers=num_workers, name=name)
