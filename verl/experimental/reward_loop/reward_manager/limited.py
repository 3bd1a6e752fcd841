"""Compatibility with verl: `verl.reward.managers.limited` with the constructor of the reward loop."""

from typing import Any

from omegaconf import DictConfig

from verl.config.compose import omega_conf_to_dataclass
from verl.config.reward_model import RewardModelConfig
from verl.experimental.reward_loop.reward_manager.base import with_loop_constructor
from verl.reward.managers import RawRewardFn, limited
from verl.reward.managers.limited import AsyncTokenBucket as AsyncTokenBucket


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
