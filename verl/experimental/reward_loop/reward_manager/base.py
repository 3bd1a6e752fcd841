"""The base of the reward loop's managers."""

import asyncio
from abc import ABC, abstractmethod
from typing import Any

import torch
from omegaconf import DictConfig

from verl.protocol import DataProto
from verl.reward.pool import Failure
from verl.workers.reward_manager.reward_rows import GRADED, parse_results, place_results, rows_of


class RewardManagerBase(ABC):
    """Scores one sample at a time by `run_single`; calling the manager scores a batch, all samples concurrently.

    `config` is the trainer's full config. `init_class` runs once for each class and process: state that all objects
    share, such as rate limits, belongs there.
    """

    _class_initialized = False
    compute_score: Any = None
    reward_fn_key = "data_source"

    def __init__(self, config: DictConfig, tokenizer: Any) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: DictConfig, tokenizer: Any) -> None:
        """Set up what all objects of the class share, once."""
        cls._class_initialized = True

    @abstractmethod
    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """{"reward_score": number, "reward_extra_info": {name: value}} of a batch with one row."""

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Scores [B, R] float32, or {"reward_tensor", "reward_extra_info"} as the managers of verl.workers give it.

        A row that fails raises RewardError, or is marked as lost with reward_model.error=drop.
        """

        async def all_rows() -> list[Any]:
            return await asyncio.gather(*(self.graded(data[i : i + 1]) for i in range(len(data))))

        rows = rows_of(data, self.reward_fn_key)
        drops = self.config.reward_model.get("error", "raise") == "drop"
        known = data.non_tensor_batch.get(GRADED)
        results = asyncio.run(all_rows()) if known is None else known.tolist()
        scored = place_results(data, parse_results(rows, results, drops, self.compute_score))
        return scored if return_dict else scored["reward_tensor"]

    async def graded(self, row: DataProto) -> Any:
        """`run_single` as a dict with the score among its extras, or a Failure."""
        try:
            result = await self.run_single(row)
        except Exception as error:
            return getattr(error, "failure", None) or Failure.of(error)
        return {"score": result["reward_score"], **result["reward_extra_info"]}
