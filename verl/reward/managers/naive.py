"""Scores samples by a function of one sample."""

import asyncio
import inspect
from functools import partial
from typing import Any

import torch

from verl.config.reward_model import RewardModelConfig
from verl.data.chat_template import answer_text
from verl.protocol import DataProto
from verl.reward.managers.base import RawRewardFn, SampleRewardManager, register
from verl.reward.pool import BatchedCalls, ExternFunction, Failure, GradingPool
from verl.reward.rows import RewardError, Row, model_text, parse_result, response_turns, rows_of
from verl.utils.user_code import defined_at

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")  # of a reward function
_GRACE_S = 5.0  # beyond the limit of a row, for a shard of coroutines that limit themselves
_MAX_FAILURES = 8  # rows of failed shards that fail alone before the rest is given up: each may take its full limit


@register("naive")
class NaiveRewardManager(SampleRewardManager):
    """Calls `compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)` for each row.

    A function given by file and name (`custom_reward_function`, the rule rewards) runs in `reward_model.num_workers`
    processes, which are killed when a row takes longer than `reward_model.item_timeout`; any other, or any with
    `reward_model.num_workers=0`, runs here without a limit. A coroutine function is awaited for all rows concurrently,
    and for each row alone when one of them blocks or ends its process.

    `run_single` calls the function in this process without a limit: awaits it, or runs it in a thread.
    """

    concurrent = False
    always_in_processes = False  # also functions that are not given by file and name
    in_other_thread = staticmethod(asyncio.to_thread)  # how `run_single` calls a plain function

    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source", **reward_kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or ExternFunction("pkg://verl.reward.rules", "default_compute_score")
        self.reward_fn_key = reward_fn_key
        self.reward_kwargs = reward_kwargs
        self.settings = RewardModelConfig()
        self._pool: GradingPool | None = None

    @staticmethod
    def workers(settings: RewardModelConfig) -> int:
        return settings.num_workers

    @property
    def in_processes(self) -> bool:
        """Whether the function runs in worker processes."""
        by_name = isinstance(self.compute_score, ExternFunction) and self.settings.num_workers > 0
        return self.always_in_processes or by_name

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        if "rm_scores" not in data.batch:
            return super().__call__(data, return_dict)
        extras = {name: data.non_tensor_batch[name] for name in data.meta_info.get("reward_extra_keys", [])}
        scores = data.batch["rm_scores"]
        return {"reward_tensor": scores, "reward_extra_info": extras} if return_dict else scores

    def results(self, data: DataProto, rows: list[Row]) -> list[Any]:
        return super().results(data, rows) if self.concurrent else self.results_of_rows(rows)

    def results_of_rows(self, rows: list[Row]) -> list[Any]:
        """The reward function's result for each row, where it runs by default: a number, a dict, or a Failure."""
        items = [{**self.arguments(row), **self.reward_kwargs} for row in rows]
        if self.in_processes:
            results = self._call_in_processes(items)
        else:
            results = asyncio.run(BatchedCalls(self.compute_score)(items))
        return [
            result if isinstance(parse_result(result), Failure) else self.adjusted(result, row)  # reported later
            for result, row in zip(results, rows, strict=True)
        ]

    def _call_in_processes(self, items: list[dict[str, Any]]) -> list[Any]:
        is_async = isinstance(self.compute_score, ExternFunction) and self.compute_score.is_async
        if self._pool is None:
            workers, seconds = self.workers(self.settings), self.settings.item_timeout
            if is_async:
                self._pool = GradingPool(BatchedCalls(self.compute_score, seconds), workers, seconds + _GRACE_S)
            else:
                self._pool = GradingPool(self.compute_score, workers, seconds)
        return _map_in_shards(self._pool, items) if is_async else self._pool.map(items)

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """The score of the row; RewardError with the function's place if it raises or returns no score.

        A function that returns a number gets the extra acc.
        """
        (row,) = rows_of(data, self.reward_fn_key)
        try:
            result = await self.call(await asyncio.to_thread(self.arguments, row) | self.reward_kwargs)
            parsed = parse_result(result)
            if not isinstance(parsed, Failure):
                parsed = parse_result(self.adjusted(result, row))
        except Exception as error:
            parsed = Failure.of(error)
        if isinstance(parsed, Failure):
            message = f"{row}: reward function {defined_at(self.compute_score)} {parsed.text}"
            raise RewardError(message, failure=parsed) from parsed.cause
        score, extras = parsed
        return {"reward_score": score, "reward_extra_info": extras or {"acc": score}}

    async def call(self, arguments: dict[str, Any]) -> Any:
        """The reward function's result for one row, in this process."""
        function = self.compute_score.function if isinstance(self.compute_score, ExternFunction) else self.compute_score
        if inspect.iscoroutinefunction(function):
            return await self.compute_score(**arguments)
        return await self.in_other_thread(partial(self.compute_score, **arguments))

    def arguments(self, row: Row) -> dict[str, Any]:
        """The keyword arguments of the reward function, without `reward_kwargs`.

        solution_str is `reward_model.judged_text` for verl's own functions, else the whole response. extra_info also
        has response_turns and model_text, by which a function tells whose text is whose.
        """
        turns = response_turns(self.tokenizer, row.response_ids, row.response_mask)
        written = model_text(turns)
        function = getattr(self.compute_score, "func", self.compute_score)  # of a functools.partial
        is_own = (getattr(function, "__module__", None) or "").startswith("verl.")
        is_written = len(turns) == 1 or (is_own and self.settings.judged_text == "model")
        text = written if is_written else answer_text(self.tokenizer, row.response_ids)
        of_row = {"data_source": row.data_source, "solution_str": text, "ground_truth": row.ground_truth}
        extra_info = {**(row.extra_info or {}), "response_turns": turns, "model_text": written}
        return {**of_row, "extra_info": extra_info}

    def adjusted(self, result: Any, row: Row) -> Any:
        """The result to report for what the reward function returned: a number, or a dict with 'score'."""
        return result


def _map_in_shards(pool: GradingPool, items: list[dict[str, Any]]) -> list[Any]:
    """The results of BatchedCalls, which each process of the pool awaits for a shard of the items at once.

    The items of a shard that fails as a whole, because one of them blocks or ends its process, are called alone.
    """
    shards = [range(first, len(items), pool.workers) for first in range(pool.workers)]
    results: list[Any] = [None] * len(items)
    repeated: list[int] = []
    of_shards = pool.map([{"items": [items[i] for i in shard]} for shard in shards])
    for shard, of_shard in zip(shards, of_shards, strict=True):
        if isinstance(of_shard, Failure):
            repeated += shard if len(shard) > 1 else []
            of_shard = [of_shard] * len(shard)
        for i, result in zip(shard, of_shard, strict=True):
            results[i] = result
    repeated.sort()
    failures = 0
    while repeated and failures < _MAX_FAILURES:
        now, repeated = repeated[: pool.workers], repeated[pool.workers :]
        for i, result in zip(now, pool.map([{"items": [items[i]]} for i in now]), strict=True):
            results[i] = result if isinstance(result, Failure) else result[0]
            failures += isinstance(results[i], Failure)
    return results
