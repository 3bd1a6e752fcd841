"""A reward function and a reward manager."""

from collections import defaultdict

import torch

from verl import DataProto
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager


def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    """Share of digits among the words of the answer, plus a bonus."""
    words = solution_str.split()
    share = sum(word.isdigit() for word in words) / max(1, len(words))
    return {"score": share + bonus, "digits": share, "asked": extra_info["question_words"]}


@register("half_points")
class HalfPointsManager(AbstractRewardManager):
    """Half of what the function gives, on the last token of the response."""

    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", **kwargs):
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score
        self.reward_fn_key = reward_fn_key

    def __call__(self, data: DataProto, return_dict=False):
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        reward_extra_info = defaultdict(list)
        for i in range(len(data)):
            item = data[i]
            prompt_length = item.batch["prompts"].shape[-1]
            valid = int(item.batch["attention_mask"][prompt_length:].sum())
            text = self.tokenizer.decode(item.batch["responses"][:valid], skip_special_tokens=True)
            result = self.compute_score(
                data_source=item.non_tensor_batch[self.reward_fn_key], solution_str=text,
                ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=item.non_tensor_batch.get("extra_info"),
            )  # fmt: skip
            for key, value in result.items():
                reward_extra_info[key].append(value)
            reward_tensor[i, valid - 1] = 0.5 * result["score"]
        if return_dict:
            return {"reward_tensor": reward_tensor, "reward_extra_info": reward_extra_info}
        return reward_tensor
