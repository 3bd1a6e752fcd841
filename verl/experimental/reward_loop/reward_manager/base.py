"""Compatibility with verl: `RewardManagerBase`, and managers with the constructor of the reward loop."""

import functools
from typing import Any

from omegaconf import DictConfig

from verl.config.compose import omega_conf_to_dataclass
from verl.config.reward_model import RewardModelConfig
from verl.reward.managers import DAPORewardManager, NaiveRewardManager, RawRewardFn, RewardManagerBase


@functools.cache
def with_loop_constructor(manager: type[NaiveRewardManager]) -> type[RewardManagerBase]:
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
            if issubclass(manager, DAPORewardManager):
                limits = {"max_resp_len": config.data.max_response_length}
                arguments = {**limits, "overlong_buffer_cfg": settings.overlong_buffer, **arguments}
            if reward_router_address is not None:
                arguments |= {
                    "reward_router_address": reward_router_address,
                    "reward_model_tokenizer": reward_model_tokenizer,
                }
            reward_fn_key = config.data.get("reward_fn_key", self.reward_fn_key)
            manager.__init__(self, tokenizer, 0, compute_score, reward_fn_key, **arguments)
            RewardManagerBase.__init__(self, config, tokenizer)
            self.settings = settings

    LoopRewardManager.__name__ = manager.__name__
    return LoopRewardManager
