"""The interface of reward managers: a callable from a batch of answers to token-level scores."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from verl.protocol import DataProto

RawRewardFn = Callable[..., Any]


class AbstractRewardManager(ABC):
    """Scores a batch; the score of a row is at one position of its response, all other positions are 0."""

    @abstractmethod
    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: RawRewardFn | None, reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None:
        """`num_examine`: samples of each data source that a call logs as text."""

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Scores [B, R] float32, or {"reward_tensor": scores, "reward_extra_info": {name: list of B values}}."""
