"""The interface of an actor: log-probs of a batch, one policy update on a batch."""

from abc import ABC, abstractmethod

import torch

from verl.protocol import DataProto
from verl.workers.config import ActorConfig


class BasePPOActor(ABC):
    """Runs on every rank over that rank's part of the batch."""

    def __init__(self, config: ActorConfig):
        self.config = config

    @abstractmethod
    def compute_log_prob(self, data: DataProto) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(log_probs [B, R], entropys [B, R] or None) of the batch's responses."""

    @abstractmethod
    def update_policy(self, data: DataProto) -> dict:
        """Trains on the batch; returns metrics, each a list of one value per mini-batch."""
