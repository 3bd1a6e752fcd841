"""Scores the answers of a batch in parallel processes."""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import repeat
from typing import Any

from verl.config.reward_model import RewardModelConfig
from verl.grading.pool import Failure, GradingPool
from verl.protocol import DataProto
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.reward_rows import RewardError, rows_of, split

_MOST = 64


@register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """The naive manager with a process a core (at most 64, at least `reward_model.num_workers`).

    Every function goes to processes; one that is not given by file and name must be importable by its name.
    """

    always_in_processes = True

    @staticmethod
    def workers(config: RewardModelConfig) -> int:
        return max(config.num_workers, min(_MOST, os.cpu_count() or 1))

    def verify(self, data: DataProto) -> list[Any]:
        """The reward function's result for each row: a number, a dict with 'score', or a Failure."""
        return self.results(data, rows_of(data, self.reward_fn_key))


async def single_compute_score(
    evaluation_func: Callable, completion: str, reference: Any, task: str, task_extra_info: Any,
    executor: Executor | None, timeout: float = 300.0,
) -> Any:  # fmt: skip
    """`evaluation_func(task, completion, reference, task_extra_info)` in `executor`; TimeoutError after `timeout` s."""
    call = partial(evaluation_func, task, completion, reference, task_extra_info)
    return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(executor, call), timeout)


async def parallel_compute_score_async(
    evaluation_func: Callable, completions: Sequence[str], references: Sequence[Any], tasks: Sequence[str],
    extra_info: Sequence[Any] | None = None, num_processes: int = 64,
) -> list[float]:  # fmt: skip
    """`run_reward_scoring` without blocking the event loop."""
    arguments = (evaluation_func, completions, references, tasks, extra_info, num_processes)
    return await asyncio.to_thread(run_reward_scoring, *arguments)


def run_reward_scoring(
    evaluation_func: Callable, completions: Sequence[str], references: Sequence[Any], tasks: Sequence[str],
    extra_info: Sequence[Any] | None = None, num_processes: int = 64,
) -> list[float]:  # fmt: skip
    """The score of each completion, by `num_processes` processes that are killed after 300 s of one completion.

    The function must be importable by its name. Its result is a number, a dict with 'score', or a list or tuple that
    begins with the score. Raises RewardError for a completion that has no score; upstream scores all of them 0 then.
    """
    rows = zip(tasks, completions, references, extra_info or repeat(None), strict=False)
    pool = GradingPool(partial(_positional, evaluation_func), min(num_processes, len(completions)), 300.0)
    try:
        results = pool.map([{"arguments": row} for row in rows])
    finally:
        pool.close()
    scores = []
    for number, result in enumerate(results):
        first = result[0] if isinstance(result, list | tuple) else result
        parsed = first if isinstance(first, Failure) else split(first)
        if isinstance(parsed, Failure):
            raise RewardError(f"completion {number}: the reward function {parsed.text}") from parsed.cause
        scores.append(parsed[0])
    return scores


def _positional(function: Callable, arguments: Sequence[Any]) -> Any:
    return function(*arguments)
