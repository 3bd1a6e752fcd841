"""Scores the answers of a batch one after the other."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from typing import Any

import torch

from verl.protocol import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.abstract import AbstractRewardManager, RawRewardFn
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.rows import (
    RewardError,
    Row,
    collect_extras,
    given_scores,
    log_examples,
    place_scores,
    rows_of,
    split_result,
)


@register("naive")
class NaiveRewardManager(AbstractRewardManager):
    """Calls `compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)` for each row.

    A coroutine function is awaited for all rows at once. A row whose function raises ends the call with a
    `RewardError` that names it; nothing is scored 0 for an error.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.reward_kwargs = reward_kwargs

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        given = given_scores(data, return_dict)
        if given is not None:
            return given
        rows = rows_of(data, self.reward_fn_key)
        results = score_rows(self.tokenizer, rows, self.compute_score, self.reward_kwargs)
        return finish(self.tokenizer, data, rows, results, self.num_examine, return_dict)


def score_rows(tokenizer: Any, rows: list[Row], compute_score: RawRewardFn, kwargs: dict[str, Any]) -> list[Any]:
    """What a per-sample reward function gives for each row."""
    results = []
    for row in rows:
        text = tokenizer.decode(row.response_ids, skip_special_tokens=True)
        try:
            results.append(
                compute_score(
                    data_source=row.data_source,
                    solution_str=text,
                    ground_truth=row.ground_truth,
                    extra_info=row.extra_info,
                    **kwargs,
                )
            )
        except Exception as error:
            raise _failure(row, error) from error
    if any(inspect.isawaitable(result) for result in results):
        return asyncio.run(_await_all(rows, results))
    return results


async def _await_all(rows: list[Row], results: list[Any]) -> list[Any]:
    async def settle(row: Row, result: Awaitable[Any] | Any) -> Any:
        try:
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            raise _failure(row, error) from error

    return list(await asyncio.gather(*(settle(row, result) for row, result in zip(rows, results, strict=True))))


def _failure(row: Row, error: Exception) -> RewardError:
    return RewardError(f"{row}: the reward function raised {type(error).__name__}: {error}")


def finish(
    tokenizer: Any, data: DataProto, rows: list[Row], results: list[Any], num_examine: int, return_dict: bool
) -> torch.Tensor | dict[str, Any]:
    """Results of the rows in the form that a manager's call gives back."""
    pairs = [split_result(result, row) for result, row in zip(results, rows, strict=True)]
    scores = place_scores(data, [score for score, _ in pairs])
    log_examples(tokenizer, rows, results, num_examine)
    if not return_dict:
        return scores
    return {"reward_tensor": scores, "reward_extra_info": collect_extras([extras for _, extras in pairs])}
