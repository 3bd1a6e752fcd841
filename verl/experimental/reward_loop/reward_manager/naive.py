"""Rewards by a function of one sample."""

import asyncio
import inspect
from functools import partial
from typing import Any

from omegaconf import DictConfig

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.experimental.reward_loop.reward_manager.registry import register
from verl.protocol import DataProto
from verl.reward.pool import ExternFunction, Failure
from verl.utils.user_code import defined_at
from verl.workers.reward_manager.abstract import RawRewardFn
from verl.workers.reward_manager.reward_rows import RewardError, Row, rows_of, split


@register("naive")
class NaiveRewardManager(RewardManagerBase):
    """Calls `compute_score(data_source, solution_str, ground_truth, extra_info)`, `async def` or not.

    A plain function runs in a thread. With `reward_router_address` it also gets that address and
    `reward_model_tokenizer`, to ask a reward model on a server.
    """

    in_other_thread = staticmethod(asyncio.to_thread)  # how a plain function is called

    def __init__(
        self, config: DictConfig, tokenizer: Any, compute_score: RawRewardFn | None = None,
        reward_router_address: str | None = None, reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer)
        self.compute_score = compute_score or ExternFunction("pkg://verl.reward.rules", "default_compute_score")
        self.reward_fn_key = config.data.get("reward_fn_key", "data_source")
        self.router = {} if reward_router_address is None else {
            "reward_router_address": reward_router_address, "reward_model_tokenizer": reward_model_tokenizer,
        }  # fmt: skip

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """The score of the row; RewardError with the function's place if it raises or returns no score."""
        (row,) = rows_of(data, self.reward_fn_key)
        try:
            text = await asyncio.to_thread(self.tokenizer.decode, row.response_ids, skip_special_tokens=True)
            result = await self.call(text, row)
            parsed = result if isinstance(result, Failure) else split(result)
        except Exception as error:
            parsed = Failure.of(error)
        if isinstance(parsed, Failure):
            error = RewardError(f"{row}: reward function {defined_at(self.compute_score)} {parsed.text}")
            error.failure = parsed
            raise error from parsed.cause
        score, extras = self.adjusted(*parsed, row)
        return {"reward_score": score, "reward_extra_info": extras}

    async def call(self, text: str, row: Row) -> Any:
        """What the reward function returns for an answer."""
        call = partial(
            self.compute_score, data_source=row.data_source, solution_str=text, ground_truth=row.ground_truth,
            extra_info=row.extra_info, **self.router,
        )  # fmt: skip
        function = self.compute_score.function if isinstance(self.compute_score, ExternFunction) else self.compute_score
        return await call() if inspect.iscoroutinefunction(function) else await self.in_other_thread(call)

    def adjusted(self, score: float, extras: dict[str, Any], row: Row) -> tuple[float, dict[str, Any]]:
        """Score and extras as they are reported; a function that returns a number gets the extra acc."""
        return score, extras or {"acc": score}
