"""Compatibility with verl: `PrimeRewardManager`, and functions that score completions in parallel processes."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

from verl.reward.managers.prime import PrimeRewardManager as PrimeRewardManager
from verl.reward.pool import Failure, GradingPool, call_by_position
from verl.reward.rows import RewardError, split
from verl.utils.user_code import defined_at

_SECONDS = 300.0  # of one completion, in run_reward_scoring


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
    begins with the score. Raises RewardError if a completion has no score, ValueError for columns of different lengths;
    upstream scores all completions 0 if one fails.
    """
    extra_info = [None] * len(completions) if extra_info is None else extra_info
    lengths = {
        "completions": len(completions), "references": len(references), "tasks": len(tasks),
        "extra_info": len(extra_info),
    }  # fmt: skip
    if len(set(lengths.values())) > 1 or num_processes < 1:
        raise ValueError(
            f"a reference, a task and an extra_info are needed for each completion, and a process; got {lengths}, "
            f"{num_processes=}."
        )
    rows = zip(tasks, completions, references, extra_info, strict=True)
    pool = GradingPool(partial(call_by_position, evaluation_func), min(num_processes, len(completions)), _SECONDS)
    try:
        results = pool.map([{"arguments": row} for row in rows])
    finally:
        pool.close()
    results = [split(r[0] if isinstance(r, list | tuple) and r else r) for r in results]
    failed = {number: result for number, result in enumerate(results) if isinstance(result, Failure)}
    if failed:
        number, first = next(((n, f) for n, f in failed.items() if f.fatal), next(iter(failed.items())))
        timeouts = sum(failure.kind == "timeout" for failure in failed.values())
        raise RewardError(
            f"completion {number} (task {tasks[number]!r}): reward function {defined_at(evaluation_func)} "
            f"{first.text.rstrip('.')}. {len(failed)} of {len(results)} completions have no score ({timeouts} took too "
            "long)."
        )
    return [score for score, _ in results]
