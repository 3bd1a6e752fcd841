"""Scores the answers of a batch one after the other."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import torch

from verl.protocol import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.abstract import AbstractRewardManager, RawRewardFn
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.rows import RewardError, Row, given_scores, log_examples, place_results, rows_of


@register("naive")
class NaiveRewardManager(AbstractRewardManager):
    """Calls `compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)` for each row.

    A coroutine function is awaited for all rows at once. A row whose function raises ends the call with a
    `RewardError` that names it; nothing is scored 0 for an error.
    """

    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source", **reward_kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.reward_kwargs = reward_kwargs

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        given = given_scores(data)
        if given is None:
            rows = rows_of(data, self.reward_fn_key)
            results = self.results(data, rows)
            given = place_results(data, rows, results)
            log_examples(self.tokenizer, rows, results, self.num_examine)
        return given if return_dict else given["reward_tensor"]

    def results(self, data: DataProto, rows: list[Row]) -> list[Any]:
        """What the reward function gives for each row: a number, or a dict with 'score'."""
        results = []
        for row in rows:
            try:
                result = self.compute_score(
                    data_source=row.data_source, solution_str=self.text(row), ground_truth=row.ground_truth,
                    extra_info=row.extra_info, **self.reward_kwargs,
                )
            except Exception as error:
                raise _failure(row, error) from error
            results.append(result)
        return asyncio.run(_await_all(rows, results)) if any(map(inspect.isawaitable, results)) else results

    def text(self, row: Row) -> str:
        """The answer of a row."""
        return self.tokenizer.decode(row.response_ids, skip_special_tokens=True)


async def _await_all(rows: list[Row], results: list[Any]) -> list[Any]:
    async def settle(row: Row, result: Any) -> Any:
        try:
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            raise _failure(row, error) from error

    return await asyncio.gather(*map(settle, rows, results))


def _failure(row: Row, error: Exception) -> RewardError:
    return RewardError(f"{row}: the reward function raised {type(error).__name__}: {error}")
