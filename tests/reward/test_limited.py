"""The manager rate_limited: limits of requests that all objects of a process share."""

import asyncio

import pytest

from tests.reward.test_managers import TOKENIZER, batch
from verl.config.reward_model import RewardModelConfig
from verl.reward.managers import RateLimitedRewardManager, limited
from verl.reward.managers.limited import AsyncTokenBucket
from verl.reward.rows import RewardError


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `asyncio.sleep` of the limits moves; a list with the time."""
    now = [100.0]

    async def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(limited.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(limited.asyncio, "sleep", sleep)
    return now


async def test_a_bucket_refills_by_its_rate(clock):
    bucket = AsyncTokenBucket(rate_limit=2.0, max_tokens=4.0)
    times = []
    for tokens in (4, 1, 1, 6):  # full; half a second each; three seconds
        await bucket.acquire(tokens)
        times.append(clock[0] - 100)
    clock[0] += 10  # more than it can hold
    await bucket.acquire(4)
    times.append(clock[0] - 100)
    assert times == [0.0, 0.5, 1.0, 4.0, 14.0]
    with pytest.raises(ValueError, match="rate_limit=0 must be above 0"):
        AsyncTokenBucket(0)


@pytest.fixture(autouse=True)
def fresh_limits(monkeypatch):
    monkeypatch.setattr(RateLimitedRewardManager, "_max_concurrent", None)
    monkeypatch.setattr(RateLimitedRewardManager, "_loop", None)


def limited_manager(function, **settings):
    manager = RateLimitedRewardManager(TOKENIZER, 0, function)
    manager.settings = RewardModelConfig(**settings)
    return manager


def test_limits_are_shared_and_kept(clock):
    times = []

    async def ask(**kwargs):
        times.append(clock[0] - 100)
        return 1.0

    limits = {"max_concurrent": 1, "max_rpm": 60, "max_tpm": 120, "estimated_tokens_per_request": 4}
    first, second = (limited_manager(ask, **limits) for _ in range(2))
    first(batch(["1"] * 2))
    second(batch(["1"]))
    # One request a second; the 120 tokens of the first minute suffice for all three.
    assert times == [0.0, 1.0, 2.0]


def test_requests_at_a_time_are_limited():
    running, most = [0], [0]

    async def ask(**kwargs):
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.005)
        running[0] -= 1
        return 1.0

    manager = limited_manager(ask, max_concurrent=2)
    for _ in range(2):  # each batch has an event loop of its own
        assert manager(batch(["1"] * 5)).sum() == 5
    assert most[0] == 2


def test_a_request_that_hangs_is_an_error():
    async def hang(**kwargs):
        await asyncio.sleep(60)

    manager = limited_manager(hang, timeout=0.05)
    with pytest.raises(RewardError, match="TimeoutError"):
        asyncio.run(manager.run_single(batch()[:1]))
    with pytest.raises(RewardError, match=r"row 0 .*TimeoutError.*2 of 2 rows have no score"):
        manager(batch())
