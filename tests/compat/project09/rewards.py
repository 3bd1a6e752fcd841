"""A reward function, and a manager of single samples."""

import inspect

from verl import DataProto
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase


async def compute_score(data_source, solution_str, ground_truth, extra_info, weight=1.0, **kwargs):
    """Share of digits among the words of the answer."""
    words = solution_str.split()
    share = sum(word.isdigit() for word in words) / max(1, len(words))
    return {"score": weight * share, "digits": share}


@register("with_turns")
class WithTurnsManager(RewardManagerBase):
    """The function's score, plus a tenth for each turn."""

    def __init__(self, config, tokenizer, compute_score, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer, compute_score)
        self.is_async = inspect.iscoroutinefunction(compute_score)

    async def run_single(self, data: DataProto) -> dict:
        data_item = data[-1]
        response_ids = data_item.batch["responses"]
        response_length = response_ids.shape[-1]
        valid = int(data_item.batch["attention_mask"][-response_length:].sum())
        text = self.tokenizer.decode(response_ids[:valid], skip_special_tokens=True)
        result = self.compute_score(
            data_source=data_item.non_tensor_batch["data_source"], solution_str=text,
            ground_truth=data_item.non_tensor_batch["reward_model"]["ground_truth"],
            extra_info=data_item.non_tensor_batch.get("extra_info", {}),
        )  # fmt: skip
        result = await result if inspect.isawaitable(result) else result
        turns = int(data_item.non_tensor_batch["__num_turns__"])
        return {"reward_score": result["score"] + 0.1 * turns, "reward_extra_info": {"digits": result["digits"]}}
