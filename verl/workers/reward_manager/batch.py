"""Scores the answers of a batch in one call of the reward function."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from verl.protocol import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.abstract import AbstractRewardManager, RawRewardFn
from verl.workers.reward_manager.naive import finish, score_rows
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.rows import RewardError, Row, given_scores, rows_of


@register("batch")
class BatchRewardManager(AbstractRewardManager):
    """Calls `compute_score(data_sources, solution_strs, ground_truths, extra_infos, **reward_kwargs) -> list`.

    A function that names them (or takes **kwargs) also gets `prompt_ids` and `response_ids` (lists of ids without
    padding), `attention_mask` [B, P+R] and `batch_tensors` (every tensor of the batch by name). A function without
    a parameter `data_sources` is a per-sample one: it is called for each row, as the naive manager does.
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

    def verify(self, data: DataProto) -> list[Any]:
        """What the reward function gives for each row: a number, or a dict with 'score'."""
        return self._verify(data, rows_of(data, self.reward_fn_key))

    def _verify(self, data: DataProto, rows: list[Row]) -> list[Any]:
        parameters = inspect.signature(self.compute_score).parameters
        if "data_sources" not in parameters:
            return score_rows(self.tokenizer, rows, self.compute_score, self.reward_kwargs)
        offered = {
            "prompt_ids": [row.prompt_ids for row in rows],
            "response_ids": [row.response_ids for row in rows],
            "attention_mask": data.batch["attention_mask"],
            "batch_tensors": dict(data.batch.items()),
        }
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        try:
            results = list(
                self.compute_score(
                    data_sources=[row.data_source for row in rows],
                    solution_strs=[self.tokenizer.decode(row.response_ids, skip_special_tokens=True) for row in rows],
                    ground_truths=[row.ground_truth for row in rows],
                    extra_infos=[row.extra_info for row in rows],
                    **{name: value for name, value in offered.items() if takes_all or name in parameters},
                    **self.reward_kwargs,
                )
            )
        except Exception as error:
            sources = ", ".join(sorted({str(row.data_source) for row in rows}))
            raise RewardError(
                f"batch of {len(rows)} rows (data_source: {sources}): the reward function raised "
                f"{type(error).__name__}: {error}"
            ) from error
        if len(results) != len(rows):
            raise RewardError(f"the reward function gave {len(results)} scores for {len(rows)} rows; give one a row.")
        return results

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        given = given_scores(data, return_dict)
        if given is not None:
            return given
        rows = rows_of(data, self.reward_fn_key)
        return finish(self.tokenizer, data, rows, self._verify(data, rows), self.num_examine, return_dict)
