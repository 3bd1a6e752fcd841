"""Compatibility with verl: scores of batches, and reward managers that are built from the trainer's config."""

import asyncio
import functools
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig

from verl.config.compose import omega_conf_to_dataclass
from verl.config.reward_model import RewardModelConfig
from verl.protocol import DataProto
from verl.reward import managers
from verl.reward.loading import build_manager, load_reward_manager, load_served_reward, to_dict
from verl.reward.managers import AbstractRewardManager, RewardManagerBase, SampleRewardManager, register  # noqa: F401
from verl.reward.managers.base import REWARD_MANAGER_REGISTRY as REWARD_LOOP_MANAGER_REGISTRY  # noqa: F401
from verl.reward.managers.limited import AsyncTokenBucket  # noqa: F401
from verl.reward.managers.remote import RewardComputeWorker as _RewardComputeWorker
from verl.utils.tokenizer import policy_tokenizer

RewardComputeWorker = ray.remote(num_cpus=0)(_RewardComputeWorker)


def compute_reward(data: DataProto, reward_fn: AbstractRewardManager) -> tuple[torch.Tensor, dict[str, Any]]:
    """Token-level scores [B, R] float32 and extras {name: list of B values}; `drop_failed` reads the extra __lost__."""
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
        reward_fn = load_reward_manager(config, tokenizer, 0, **to_dict(config.reward_model.get("reward_kwargs")))
    return compute_reward(data, reward_fn)


@functools.cache
def with_loop_constructor(manager: type[SampleRewardManager]) -> type[RewardManagerBase]:
    """A subclass of a manager that is built from the trainer's config and scores samples concurrently."""

    class LoopRewardManager(manager, RewardManagerBase):
        concurrent = True

        def __init__(
            self, config: DictConfig, tokenizer: Any, compute_score: managers.RawRewardFn | None = None,
            reward_router_address: str | None = None, reward_model_tokenizer: Any = None,
            num_examine: int | None = None, reward_fn_key: str | None = None, **kwargs: Any,
        ) -> None:  # fmt: skip
            served = {"reward_router_address": reward_router_address, "reward_model_tokenizer": reward_model_tokenizer}
            RewardManagerBase.__init__(self, config, tokenizer, compute_score, **served)
            served = served if reward_router_address is not None else {}
            arguments = omega_conf_to_dataclass(config.reward_model, RewardModelConfig).reward_kwargs
            made = build_manager(manager, config, tokenizer, compute_score, num_examine or 0, arguments, **served)
            vars(self).update(vars(made))
            self.reward_fn_key = reward_fn_key or self.reward_fn_key

    LoopRewardManager.__name__ = manager.__name__
    return LoopRewardManager


DAPORewardManager = with_loop_constructor(managers.DAPORewardManager)
NaiveRewardManager = with_loop_constructor(managers.NaiveRewardManager)
RateLimitedRewardManager = with_loop_constructor(managers.RateLimitedRewardManager)
RemoteRewardManager = with_loop_constructor(managers.RemoteRewardManager)


def get_reward_manager_cls(name: str) -> type[RewardManagerBase]:
    """The class of that name, built from the trainer's config; ValueError if there is none or it scores batches."""
    manager = managers.get_reward_manager_cls(name)
    if not issubclass(manager, SampleRewardManager):
        what = f"reward manager {manager.__name__} scores whole batches; the reward loop needs a subclass of "
        raise ValueError(f"{what}RewardManagerBase, which scores single samples.")
    return manager if issubclass(manager, RewardManagerBase) else with_loop_constructor(manager)


class RewardLoopWorker:
    """Scores samples by the configured manager, or by the reward model that `reward_router_address` serves."""

    def __init__(self, config: DictConfig, reward_router_address: str | None = None) -> None:
        self.config, self.reward_router_address = config, reward_router_address
        self.tokenizer, _ = policy_tokenizer(config)
        settings = omega_conf_to_dataclass(config.reward_model, RewardModelConfig)
        if settings.enable:
            self.manager = load_served_reward(config, self.tokenizer, reward_router_address)
        else:
            self.manager = load_reward_manager(config, self.tokenizer, 0, **settings.reward_kwargs)

    async def compute_score_batch(self, data: DataProto) -> list[dict[str, Any]]:
        """`compute_score` of every row, concurrently."""
        return list(await asyncio.gather(*(self.compute_score(data[i : i + 1]) for i in range(len(data)))))

    async def compute_score(self, data: DataProto) -> dict[str, Any]:
        """{"reward_score": number, "reward_extra_info": {name: value}} of a batch with one row."""
        return await self.manager.run_single(data)

    compute_score_disrm = compute_score  # with a discriminative model its score, and without one that of the manager


class RewardLoopManager:
    """Scores batches by the manager of a RewardLoopWorker in this process."""

    def __init__(
        self, config: DictConfig, rm_resource_pool: Any = None, reward_router_address: str | None = None
    ) -> None:
        self.config, self.worker = config, RewardLoopWorker(config, reward_router_address)

    def compute_rm_score(self, data: DataProto) -> DataProto:
        """rm_scores [B, R] float32, on the last counted token, with the reward's extras (reward_extra_keys)."""
        scores, extras = compute_reward(data, self.worker.manager)
        columns = {name: np.array(values, dtype=object) for name, values in extras.items()}
        return DataProto.from_dict({"rm_scores": scores}, columns, {"reward_extra_keys": sorted(columns)})
