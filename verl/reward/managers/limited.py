"""Rewards that ask a service, within its limits."""

import asyncio
import time
from typing import Any, ClassVar

from verl.config.reward_model import RewardModelConfig
from verl.reward.managers.base import register
from verl.reward.managers.naive import NaiveRewardManager
from verl.utils.threads import in_thread


class AsyncTokenBucket:
    """A budget that refills by `rate_limit` tokens per second up to `max_tokens` (default: one second's refill)."""

    def __init__(self, rate_limit: float, max_tokens: float | None = None) -> None:
        if rate_limit <= 0:
            raise ValueError(f"rate_limit={rate_limit} must be above 0.")
        self.rate_limit = rate_limit
        self.max_tokens = rate_limit if max_tokens is None else max_tokens
        self.tokens = self.max_tokens
        self.last_update: float | None = None  # no token was taken yet

    async def acquire(self, num_tokens: float = 1.0) -> None:
        """Take `num_tokens`, and wait until the budget has made up for them; callers are served in order."""
        now = time.monotonic()
        refill = 0.0 if self.last_update is None else (now - self.last_update) * self.rate_limit
        self.tokens = min(self.max_tokens, self.tokens + refill)
        self.last_update = now
        self.tokens -= num_tokens  # below 0 it is a debt, which later callers wait for as well
        if self.tokens < 0:
            await asyncio.sleep(-self.tokens / self.rate_limit)


@register("rate_limited")
class RateLimitedRewardManager(NaiveRewardManager):
    """Limits of reward_model, which all objects of a process share: max_concurrent, max_rpm, max_tpm, timeout.

    A request counts `estimated_tokens_per_request` tokens against max_tpm. The reward function is usually `async def`.
    """

    concurrent = True
    # The default pool may have fewer threads than max_concurrent, and waits for a call that hangs.
    in_other_thread = staticmethod(in_thread)
    _semaphore: ClassVar[asyncio.Semaphore | None] = None
    _max_concurrent: ClassVar[int | None] = None
    _rpm_limiter: ClassVar[AsyncTokenBucket | None] = None
    _tpm_limiter: ClassVar[AsyncTokenBucket | None] = None
    _loop: ClassVar[asyncio.AbstractEventLoop | None] = None

    @classmethod
    def init_limits(cls, settings: RewardModelConfig) -> None:
        """Create the shared limits, at the first call in the process."""
        if cls._max_concurrent is not None:
            return
        cls._max_concurrent = settings.max_concurrent
        cls._rpm_limiter = AsyncTokenBucket(settings.max_rpm / 60) if settings.max_rpm else None
        cls._tpm_limiter = AsyncTokenBucket(settings.max_tpm / 60, settings.max_tpm) if settings.max_tpm else None

    @staticmethod
    def workers(settings: RewardModelConfig) -> int:
        return 1

    async def call(self, arguments: dict[str, Any]) -> Any:
        """The function's result, after a place under the limits is free; TimeoutError after `timeout` seconds."""
        self.init_limits(self.settings)
        cls, loop = RateLimitedRewardManager, asyncio.get_running_loop()
        if cls._loop is not loop:  # a semaphore belongs to one event loop, and each batch may have its own
            cls._semaphore, cls._loop = asyncio.Semaphore(self._max_concurrent), loop
        async with cls._semaphore:
            if self._rpm_limiter is not None:
                await self._rpm_limiter.acquire()
            if self._tpm_limiter is not None:
                await self._tpm_limiter.acquire(self.settings.estimated_tokens_per_request)
            return await asyncio.wait_for(super().call(arguments), self.settings.timeout)
