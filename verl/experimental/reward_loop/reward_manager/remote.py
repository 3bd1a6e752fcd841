"""Rewards whose function runs in Ray actors: heavy functions do not block the event loop or its threads."""

import asyncio
import itertools
from typing import Any

import ray
from omegaconf import DictConfig

from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.experimental.reward_loop.reward_manager.registry import register
from verl.reward.pool import Together
from verl.workers.reward_manager.abstract import RawRewardFn
from verl.workers.reward_manager.reward_rows import Row


@ray.remote(num_cpus=0)  # the session reserves one CPU for all rewards
class RewardComputeWorker:
    """Runs a reward function, `async def` or not, in its own process."""

    def __init__(self, compute_score: RawRewardFn) -> None:
        self.compute_score = Together(compute_score)

    def compute(self, **arguments: Any) -> Any:
        """The function's result for one answer."""
        return asyncio.run(self.compute_score([arguments]))[0]


@register("remote")
class RemoteRewardManager(NaiveRewardManager):
    """The naive manager over `reward_model.num_workers` Ray actors, which take samples in turn."""

    def __init__(
        self, config: DictConfig, tokenizer: Any, compute_score: RawRewardFn | None = None,
        reward_router_address: str | None = None, reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score, reward_router_address, reward_model_tokenizer)
        number = max(1, config.reward_model.get("num_workers") or 1)
        self.workers = [RewardComputeWorker.remote(self.compute_score) for _ in range(number)]
        self.turns = itertools.cycle(self.workers)

    async def call(self, text: str, row: Row) -> Any:
        """The result of the next actor."""
        return await next(self.turns).compute.remote(
            data_source=row.data_source, solution_str=text, ground_truth=row.ground_truth, extra_info=row.extra_info,
            **self.router,
        )  # fmt: skip
