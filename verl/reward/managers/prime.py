"""The naive manager with a process per core."""

import math
import os

import torch

from verl.config.reward_model import RewardModelConfig
from verl.protocol import DataProto
from verl.reward.managers.base import register
from verl.reward.managers.naive import NaiveRewardManager
from verl.reward.pool import Failure
from verl.reward.rows import parse_results, rows_of

_MAX_PROCESSES = 64


@register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """The naive manager with a process per core (at most 64, at least `reward_model.num_workers`).

    Every function goes to processes; one that is not given by file and name must be importable by its name.
    """

    always_in_processes = True

    @staticmethod
    def workers(settings: RewardModelConfig) -> int:
        return max(settings.num_workers, min(_MAX_PROCESSES, os.cpu_count() or 1))

    def verify(self, data: DataProto) -> list[float]:
        """The score of each row, also kept as `data.batch["acc"]` [B] float32.

        A row without a score ends the call with a RewardError, or is NaN (reward_model.error=drop).
        """
        rows = rows_of(data, self.reward_fn_key)
        results = parse_results(rows, self.results(data, rows), self.settings.error == "drop", self.compute_score)
        scores = [math.nan if isinstance(result, Failure) else result[0] for result in results]
        data.batch["acc"] = torch.tensor(scores, dtype=torch.float32, device=data.batch["responses"].device)
        return scores
