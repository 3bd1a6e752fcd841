"""Scores the answers of a batch in parallel processes."""

import os

from verl.config.reward_model import RewardModelConfig
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import register

_MOST = 64


@register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """The naive manager with a process a core (at most 64, at least `reward_model.num_workers`).

    Every function goes to processes; one that is not given by file and name must be importable by its name.
    """

    always_in_processes = True

    @staticmethod
    def workers(config: RewardModelConfig) -> int:
        return max(config.num_workers, min(_MOST, os.cpu_count() or 1))
