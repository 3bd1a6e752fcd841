"""The interface of a critic: values of a batch, one update on a batch."""

from abc import ABC, abstractmethod

import torch

from verl.config.critic import CriticConfig
from verl.protocol import DataProto


class BasePPOCritic(ABC):
    """Runs on every rank over that rank's part of the batch."""

    def __init__(self, config: CriticConfig):
        self.config = config

    @abstractmethod
    def compute_values(self, data: DataProto) -> torch.Tensor:
        """Values [B, R] float32: the expected return before each response token; 0 where nothing is counted."""

    @abstractmethod
    def update_critic(self, data: DataProto) -> dict:
        """Trains on the batch; returns metrics, each a list of one value a mini-batch."""
