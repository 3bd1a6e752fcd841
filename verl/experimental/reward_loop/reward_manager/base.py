"""Compatibility with verl: `RewardManagerBase`, and managers with the constructor of the reward loop."""

import asyncio
import functools
from typing import Any

import torch
from omegaconf import DictConfig

from verl.config.compose import omega_conf_to_dataclass
from verl.config.reward_model import RewardModelConfig
from verl.protocol import DataProto
from verl.reward.managers import DAPORewardManager, NaiveRewardManager, RawRewardFn
from verl.reward.managers import RewardManagerBase as _RewardManagerBase


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
            RewardManagerBase.__init__(self, config, tokenizer, self.compute_score)
            self.settings = settings

    LoopRewardManager.__name__ = manager.__name__
    return LoopRewardManager
