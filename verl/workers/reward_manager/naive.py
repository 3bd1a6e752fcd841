"""Scores the answers of a batch one by one."""

import asyncio
from typing import Any

import torch

from verl.config.reward_model import RewardModelConfig
from verl.protocol import DataProto
from verl.reward.pool import ExternFunction, Failure, GradingPool, Together
from verl.workers.reward_manager.abstract import AbstractRewardManager, RawRewardFn
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.reward_rows import GRADED, Row, log_examples, parse_results, place_results, rows_of

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")  # of a reward function
_GRACE_S = 5.0  # beyond the limit of a row, for a share of coroutines that limit themselves
_MOST_FAILURES = 8  # rows of a failed share that fail alone before the rest is given up: each may take its full limit


@register("naive")
class NaiveRewardManager(AbstractRewardManager):
    """Calls `compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)` for each row.

    A function given by file and name (`custom_reward_function`, the rule rewards) runs in `reward_model.num_workers`
    processes, which are killed when a row takes longer than `reward_model.item_timeout`; any other, or any with
    `reward_model.num_workers=0`, runs here without a limit. A coroutine function is awaited for all rows concurrently,
    and for each row alone when one of them blocks or ends its process. A row whose function raises or hangs ends the
    call with a RewardError that names it, or is marked as lost (`reward_model.error`); it is never scored 0.
    """

    always_in_processes = False  # also functions that are not given by file and name

    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source", **reward_kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or ExternFunction("pkg://verl.reward.rules", "default_compute_score")
        self.reward_fn_key = reward_fn_key
        self.reward_kwargs = reward_kwargs
        self.config = RewardModelConfig()
        self._pool: GradingPool | None = None

    @staticmethod
    def workers(config: RewardModelConfig) -> int:
        """Processes that grade."""
        return config.num_workers

    @property
    def in_processes(self) -> bool:
        """Whether the function runs in worker processes."""
        by_name = isinstance(self.compute_score, ExternFunction) and self.config.num_workers > 0
        return self.always_in_processes or by_name

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        if "rm_scores" in data.batch:
            extras = {name: data.non_tensor_batch[name] for name in data.meta_info.get("reward_extra_keys", [])}
            scored = {"reward_tensor": data.batch["rm_scores"], "reward_extra_info": extras}
        else:
            rows = rows_of(data, self.reward_fn_key)
            known = data.non_tensor_batch.get(GRADED)
            results = self.results(data, rows) if known is None else known.tolist()
            results = parse_results(rows, results, self.config.error == "drop", self.compute_score)
            scored = place_results(data, results)
            log_examples(self.tokenizer, rows, results, self.num_examine)
        return scored if return_dict else scored["reward_tensor"]

    @property
    def grades_rows(self) -> bool:
        """Whether a sample's result does not depend on the others of its batch."""
        return True

    def results(self, data: DataProto, rows: list[Row]) -> list[Any]:
        """The reward function's result for each row: a number, a dict with 'score', or a Failure."""
        items = [
            {
                "data_source": row.data_source, "solution_str": self.text(row), "ground_truth": row.ground_truth,
                "extra_info": row.extra_info, **self.reward_kwargs,
            }
            for row in rows
        ]  # fmt: skip
        if self.in_processes:
            return self._in_processes(items)
        return asyncio.run(Together(self.compute_score)(items))

    def _in_processes(self, items: list[dict[str, Any]]) -> list[Any]:
        workers, seconds = self.workers(self.config), self.config.item_timeout
        together = isinstance(self.compute_score, ExternFunction) and self.compute_score.is_async
        if self._pool is None:
            function = Together(self.compute_score, seconds) if together else self.compute_score
            self._pool = GradingPool(function, workers, seconds + _GRACE_S if together else seconds)
        if not together:
            return self._pool.map(items)
        shares = [items[i::workers] for i in range(workers)]
        results: list[Any] = [None] * len(items)
        suspects: list[int] = []
        for i, result in enumerate(self._pool.map([{"items": share} for share in shares])):
            failed = isinstance(result, Failure)
            results[i::workers] = [result] * len(shares[i]) if failed else result
            suspects += range(i, len(items), workers) if failed and len(shares[i]) > 1 else []
        suspects, failures = sorted(suspects), 0
        while suspects and failures < _MOST_FAILURES:  # each row by itself, to find those that fail
            rows, suspects = suspects[:workers], suspects[workers:]
            for row, result in zip(rows, self._pool.map([{"items": [items[row]]} for row in rows]), strict=True):
                results[row] = result if isinstance(result, Failure) else result[0]
                failures += isinstance(results[row], Failure)
        return results

    def text(self, row: Row) -> str:
        """The answer of a row."""
        return self.tokenizer.decode(row.response_ids, skip_special_tokens=True)
