"""A reward function that runs in Ray actors: heavy functions do not block the event loop or its threads."""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

from verl.config.reward_model import RewardModelConfig
from verl.reward.managers.base import RawRewardFn, register
from verl.reward.managers.naive import NaiveRewardManager
from verl.reward.pool import BatchedCalls


class RewardComputeWorker:
    """Runs a reward function, `async def` or not, in the process of a Ray actor."""

    def __init__(self, compute_score: RawRewardFn) -> None:
        self.compute_score = BatchedCalls(compute_score)

    def compute(self, **arguments: Any) -> Any:
        """The function's result for one answer."""
        return asyncio.run(self.compute_score([arguments]))[0]


@register("remote")
class RemoteRewardManager(NaiveRewardManager):
    """The naive manager over `reward_model.num_workers` Ray actors, which take samples in turn."""

    concurrent = True
    _turns: Iterator[Any] | None = None

    @staticmethod
    def workers(settings: RewardModelConfig) -> int:
        return max(1, settings.num_workers)

    async def call(self, arguments: dict[str, Any]) -> Any:
        """The result of the next actor; they are started with the first call."""
        if self._turns is None:
            import ray

            actor = ray.remote(num_cpus=0)(RewardComputeWorker)  # the session reserves one CPU for all rewards
            workers = [actor.remote(self.compute_score) for _ in range(self.workers(self.settings))]
            self._turns = itertools.cycle(workers)
        return await next(self._turns).compute.remote(**arguments)
