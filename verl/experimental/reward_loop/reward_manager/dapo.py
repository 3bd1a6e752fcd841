"""The naive manager with DAPO's penalty of overlong answers."""

from typing import Any

from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.experimental.reward_loop.reward_manager.registry import register
from verl.workers.reward_manager.dapo import overlong_penalty
from verl.workers.reward_manager.reward_rows import Row


@register("dapo")
class DAPORewardManager(NaiveRewardManager):
    """Adds the penalty of `reward_model.reward_kwargs.overlong_buffer_cfg` (or reward_model.overlong_buffer).

    The longest answer is `reward_kwargs.max_resp_len`, else data.max_response_length.
    """

    def adjusted(self, score: float, extras: dict[str, Any], row: Row) -> tuple[float, dict[str, Any]]:
        settings = self.config.reward_model.get("reward_kwargs") or {}
        buffer = settings.get("overlong_buffer_cfg") or self.config.reward_model.get("overlong_buffer")
        extras = {"acc": score, **extras}
        if not buffer or not buffer["enable"]:
            return score, extras
        longest = settings.get("max_resp_len") or self.config.data.max_response_length
        penalty = overlong_penalty(len(row.response_ids), longest, buffer)
        if buffer["log"]:
            extras |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return score + penalty, extras
