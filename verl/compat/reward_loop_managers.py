"""Compatibility with verl: the reward loop's managers of single samples, their base class and their registry."""

import asyncio
import functools
from typing import Any

import ray
import torch
from omegaconf import DictConfig

from verl.config.compose import omega_conf_to_dataclass
from verl.config.reward_model import RewardModelConfig
from verl.protocol import DataProto
from verl.reward.managers import (
    AbstractRewardManager,
    RawRewardFn,
    SampleRewardManager,
    base,
    dapo,
    limited,
    naive,
    remote,
)
from verl.reward.managers import RewardManagerBase as _RewardManagerBase
from verl.reward.managers.base import REWARD_MANAGER_REGISTRY as REWARD_LOOP_MANAGER_REGISTRY
from verl.reward.managers.limited import AsyncTokenBucket  # noqa: F401

register = REWARD_LOOP_MANAGER_REGISTRY.register


class RewardManagerBase(_RewardManagerBase):
    """As verl.reward.managers.RewardManagerBase, with the tensor of scores and the event loop of verl's."""

    def __init__(
        self, config: DictConfig, tokenizer: Any, compute_score: RawRewardFn | None = None,
        reward_router_address: str | None = None, reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        self.reward_router_address, self.reward_model_tokenizer = reward_router_address, reward_model_tokenizer

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the running `run_single`."""
        return asyncio.get_running_loop()

    @classmethod
    def assemble_rm_scores(cls, data: DataProto, scores: list[float]) -> torch.Tensor:
        """Scores [B, R] float32 of a batch: that of each row at the last token of its response, 0 elsewhere."""
        placed = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        lengths = data.batch["attention_mask"][:, -placed.shape[1] :].sum(-1).long()
        last = (lengths - 1).clamp(min=0).unsqueeze(-1)
        return placed.scatter(1, last, torch.tensor(scores, dtype=torch.float32).unsqueeze(-1))


@functools.cache
def with_loop_constructor(manager: type[naive.NaiveRewardManager]) -> type[RewardManagerBase]:
    """A subclass of a manager that is built from the trainer's config and scores samples concurrently."""

    class LoopRewardManager(manager, RewardManagerBase):
        concurrent = True
        workers = staticmethod(RewardManagerBase.workers)

        def __init__(
            self, config: DictConfig, tokenizer: Any, compute_score: RawRewardFn | None = None,
            reward_router_address: str | None = None, reward_model_tokenizer: Any = None,
        ) -> None:
            settings = omega_conf_to_dataclass(config.reward_model, RewardModelConfig)
            arguments = dict(settings.reward_kwargs)
            if issubclass(manager, dapo.DAPORewardManager):
                limits = {"max_resp_len": config.data.max_response_length}
                arguments = {**limits, "overlong_buffer_cfg": settings.overlong_buffer, **arguments}
            if reward_router_address is not None:
                arguments |= {
                    "reward_router_address": reward_router_address,
                    "reward_model_tokenizer": reward_model_tokenizer,
                }
            reward_fn_key = config.data.get("reward_fn_key", self.reward_fn_key)
            manager.__init__(self, tokenizer, 0, compute_score, reward_fn_key, **arguments)
            RewardManagerBase.__init__(self, config, tokenizer, self.compute_score)
            self.settings = settings

    LoopRewardManager.__name__ = manager.__name__
    return LoopRewardManager


DAPORewardManager = with_loop_constructor(dapo.DAPORewardManager)
NaiveRewardManager = with_loop_constructor(naive.NaiveRewardManager)
RemoteRewardManager = with_loop_constructor(remote.RemoteRewardManager)
RewardComputeWorker = ray.remote(num_cpus=0)(remote.RewardComputeWorker)


class RateLimitedRewardManager(with_loop_constructor(limited.RateLimitedRewardManager)):
    """The limits are created with the first object of the process."""

    def __init__(
        self, config: DictConfig | None = None, tokenizer: Any = None, compute_score: RawRewardFn | None = None,
        reward_router_address: str | None = None, reward_model_tokenizer: Any = None,
        num_examine: int | None = None, reward_fn_key: str | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        if config is None:
            raise ValueError("RateLimitedRewardManager needs config, whose section reward_model has its limits.")
        super().__init__(config, tokenizer, compute_score, reward_router_address, reward_model_tokenizer)
        self.reward_fn_key = reward_fn_key or self.reward_fn_key

    @classmethod
    def init_class(cls, config: DictConfig, tokenizer: Any) -> None:
        cls.init_limits(omega_conf_to_dataclass(config.reward_model, RewardModelConfig))


def get_reward_manager_cls(name: str) -> type[RewardManagerBase]:
    """The class of that name, with the constructor of the reward loop; ValueError if there is none."""
    return loop_manager_class(base.get_reward_manager_cls(name))


def loop_manager_class(manager: type[AbstractRewardManager]) -> type[RewardManagerBase]:
    """The class with the constructor of the reward loop; ValueError if it scores whole batches."""
    if not issubclass(manager, SampleRewardManager):
        raise ValueError(
            f"reward manager {manager.__name__} scores whole batches; the reward loop needs a subclass of "
            "RewardManagerBase, which scores single samples."
        )
    return manager if issubclass(manager, RewardManagerBase) else with_loop_constructor(manager)
