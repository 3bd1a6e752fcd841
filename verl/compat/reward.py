"""Compatibility with verl: names of `verl.reward.loading`, and scores of a batch."""

from typing import Any

import ray
import torch
from omegaconf import DictConfig

from verl.protocol import DataProto
from verl.reward.loading import *  # noqa: F403
from verl.reward.loading import load_reward_manager, to_dict
from verl.reward.managers import AbstractRewardManager
from verl.reward.rows import drop_failed  # noqa: F401


def compute_reward(data: DataProto, reward_fn: AbstractRewardManager) -> tuple[torch.Tensor, dict[str, Any]]:
    """Token-level scores [B, R] float32 and extras {name: list of B values}. Errors are not caught.

    With `reward_model.error=drop` an extra `__lost__` marks rows without a score: see `drop_failed`.
    """
    result = reward_fn(data, return_dict=True)
    return result["reward_tensor"], result["reward_extra_info"]


@ray.remote(num_cpus=1)
def compute_reward_async(
    data: DataProto, config: DictConfig | None = None, tokenizer: Any = None, reward_fn: AbstractRewardManager = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """`compute_reward` as a Ray task; without `reward_fn` the manager is built from `config` and `tokenizer`."""
    if reward_fn is None:
        if config is None or tokenizer is None:
            raise ValueError("compute_reward_async needs `reward_fn`, or both `config` and `tokenizer`.")
        kwargs = to_dict(config.reward_model.get("reward_kwargs"))
        reward_fn = load_reward_manager(config, tokenizer, num_examine=0, **kwargs)
    return compute_reward(data, reward_fn)
