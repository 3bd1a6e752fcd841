"""Scores the answers of a batch in one call of the reward function."""

import inspect
from functools import partial
from typing import Any

from loguru import logger

from verl.protocol import DataProto
from verl.reward.managers.base import register
from verl.reward.managers.naive import ARGUMENTS, NaiveRewardManager
from verl.reward.pool import Failure, GradingPool, call_for_batch
from verl.reward.rows import RewardError, Row, rows_of
from verl.utils.user_code import defined_at


@register("batch")
class BatchRewardManager(NaiveRewardManager):
    """Calls `compute_score(data_sources, solution_strs, ground_truths, extra_infos, **reward_kwargs) -> list`.

    A function with these parameters (or **kwargs) also gets `prompt_ids` and `response_ids` (lists of ids without
    padding), `attention_mask` [B, P+R] and `batch_tensors` (every tensor of the batch by name). A function without a
    parameter `data_sources` is called for each row, as by the naive manager.

    A function given by file and name runs in a process, which is killed when the batch takes longer than
    `reward_model.batch_timeout`; any other, or any with `reward_model.num_workers=0`, runs here without a limit.
    """

    def verify(self, data: DataProto) -> list[Any]:
        """The reward function's result for each row: a number, or a dict with 'score'."""
        return self.results(data, rows_of(data, self.reward_fn_key))

    @property
    def can_stream(self) -> bool:
        return "data_sources" not in inspect.signature(self.compute_score).parameters

    def results(self, data: DataProto, rows: list[Row]) -> list[Any]:
        if self.can_stream:
            return super().results(data, rows)
        results = self._call_once(self._batch_arguments(data, rows))
        name = f"reward function {defined_at(self.compute_score)}"
        if isinstance(results, Failure):
            sources = ", ".join(sorted({str(row.data_source) for row in rows}))
            problem = f"batch of {len(rows)} rows (data_source: {sources}): {name} {results.text}"
            if results.kind == "timeout":
                problem += f" (reward_model.batch_timeout={self.settings.batch_timeout:g})"
            if self.settings.error != "drop":
                raise RewardError(problem) from results.cause
            logger.warning("{}: all of them are left out", problem)
            return [results] * len(rows)
        if len(results) != len(rows):
            raise RewardError(f"{name} returned {len(results)} scores for {len(rows)} rows; return one per row.")
        return results

    def _batch_arguments(self, data: DataProto, rows: list[Row]) -> dict[str, Any]:
        of_rows = [self.arguments(row) for row in rows]
        arguments = {f"{name}s": [of_row[name] for of_row in of_rows] for name in ARGUMENTS}
        offered = {
            "prompt_ids": [row.prompt_ids for row in rows],
            "response_ids": [row.response_ids for row in rows],
            "attention_mask": data.batch["attention_mask"],
            "batch_tensors": dict(data.batch.items()),
        }
        parameters = inspect.signature(self.compute_score).parameters
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        arguments |= {name: value for name, value in offered.items() if takes_all or name in parameters}
        return arguments | self.reward_kwargs

    def _call_once(self, arguments: dict[str, Any]) -> list[Any] | Failure:
        """The scores that the function returns for the batch, in a process or here."""
        if self.in_processes:
            if self._pool is None:
                self._pool = GradingPool(partial(call_for_batch, self.compute_score), 1, self.settings.batch_timeout)
            return self._pool.map([arguments])[0]
        try:
            return call_for_batch(self.compute_score, **arguments)
        except Exception as error:
            return Failure.of(error)
