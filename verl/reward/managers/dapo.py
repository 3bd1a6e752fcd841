"""The naive manager with DAPO's soft penalty for overlong answers."""

from collections.abc import Mapping
from typing import Any

from verl.reward.managers.base import RawRewardFn, register
from verl.reward.managers.naive import NaiveRewardManager
from verl.reward.rows import Row


def overlong_penalty(length: int, longest: int, buffer: Mapping[str, Any]) -> float:
    """-factor * max(0, length - (longest - len)) / len, for an answer of `length` tokens (arXiv 2503.14476, eq. 13).

    `buffer`: len, penalty_factor. Raises ValueError if len does not lie between 1 and `longest`.
    """
    if not 0 < buffer["len"] <= longest:
        raise ValueError(
            f"reward_model.overlong_buffer.len={buffer['len']} must lie between 1 and the longest answer, "
            f"data.max_response_length={longest}."
        )
    return -max(0, length - (longest - buffer["len"])) / buffer["len"] * buffer["penalty_factor"]


@register("dapo")
class DAPORewardManager(NaiveRewardManager):
    """Adds `overlong_penalty` to the score.

    Extras: acc (the score without the penalty, unless the reward returns acc); with `log` overlong_reward, overlong.
    """

    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source", max_resp_len: int | None = None,
        overlong_buffer_cfg: Mapping[str, Any] | None = None, **reward_kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key, **reward_kwargs)
        self.max_resp_len, self.buffer = max_resp_len, None
        if overlong_buffer_cfg is not None and overlong_buffer_cfg["enable"]:
            self.buffer = dict(overlong_buffer_cfg)
            overlong_penalty(0, max_resp_len or 0, self.buffer)  # refuses a wrong length

    def adjusted(self, result: Any, row: Row) -> Any:
        extras = dict(result) if isinstance(result, dict) else {"score": result}
        extras.setdefault("acc", extras["score"])
        if self.buffer is not None:
            penalty = overlong_penalty(len(row.response_ids), self.max_resp_len, self.buffer)
            extras["score"] = extras["score"] + penalty
            if self.buffer["log"]:
                extras |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return extras
