"""Scores the answers of a batch in one call of the reward function."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from loguru import logger

from verl.grading.pool import Failure, FullBatch, GradingPool, TravellingTensor
from verl.protocol import DataProto
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.reward_rows import RewardError, Row, rows_of


@register("batch")
class BatchRewardManager(NaiveRewardManager):
    """Calls `compute_score(data_sources, solution_strs, ground_truths, extra_infos, **reward_kwargs) -> list`.

    A function that names them (or takes **kwargs) also gets `prompt_ids` and `response_ids` (lists of ids without
    padding), `attention_mask` [B, P+R] and `batch_tensors` (every tensor of the batch by name). A function without
    a parameter `data_sources` is a per-sample one: it is called for each row, as the naive manager does.

    A function known by file and name runs in a process, which is killed when the batch takes longer than
    `reward_model.batch_timeout`; any other one, or any with `reward_model.num_workers=0`, runs here without a limit.
    """

    def verify(self, data: DataProto) -> list[Any]:
        """What the reward function gives for each row: a number, or a dict with 'score'."""
        return self.results(data, rows_of(data, self.reward_fn_key))

    def results(self, data: DataProto, rows: list[Row]) -> list[Any]:
        parameters = inspect.signature(self.compute_score).parameters
        if "data_sources" not in parameters:
            return super().results(data, rows)
        offered = {
            "prompt_ids": [row.prompt_ids for row in rows],
            "response_ids": [row.response_ids for row in rows],
            "attention_mask": data.batch["attention_mask"],
            "batch_tensors": dict(data.batch.items()),
        }
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        arguments = {
            "data_sources": [row.data_source for row in rows],
            "solution_strs": [self.text(row) for row in rows],
            "ground_truths": [row.ground_truth for row in rows],
            "extra_infos": [row.extra_info for row in rows],
            **{name: value for name, value in offered.items() if takes_all or name in parameters},
            **self.reward_kwargs,
        }
        results = self._called(arguments)
        if isinstance(results, Failure):
            sources = ", ".join(sorted({str(row.data_source) for row in rows}))
            told = f"batch of {len(rows)} rows (data_source: {sources}): the reward function {results.text}"
            if results.kind == "timeout":
                told += f" (reward_model.batch_timeout={self.config.batch_timeout:g})"
            if self.config.error != "drop":
                raise RewardError(told) from results.cause
            logger.warning("{}: all of them are left out", told)
            return [results] * len(rows)
        if len(results) != len(rows):
            raise RewardError(f"the reward function gave {len(results)} scores for {len(rows)} rows; give one a row.")
        return results

    def _called(self, arguments: dict[str, Any]) -> list[Any] | Failure:
        call = FullBatch(self.compute_score)
        if not self.in_processes:
            try:
                return call(**arguments)
            except Exception as error:
                return Failure.of(error)
        if self._pool is None:
            self._pool = GradingPool(call, 1, self.config.batch_timeout)
        return self._pool.map([{name: _travelling(value) for name, value in arguments.items()}])[0]


def _travelling(value: Any) -> Any:
    """Tensors, also those of a dict, as copies: a process that is killed must not hold memory that is shared."""
    if isinstance(value, torch.Tensor):
        return TravellingTensor(value)
    return {name: _travelling(part) for name, part in value.items()} if isinstance(value, dict) else value
