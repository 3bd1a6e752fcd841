"""Resampling of a scored batch by its rewards (PF-PPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from verl.config.algorithm import check_reweight_method

if TYPE_CHECKING:
    from verl.protocol import DataProto


def _weights(scores: torch.Tensor, reweight_method: str, weight_pow: float) -> torch.Tensor:
    """Sampling weight of each sample. [N] -> [N], none below 0. ValueError for an unknown method."""
    check_reweight_method(reweight_method)
    if reweight_method == "pow":
        return scores.abs().pow(weight_pow)
    best = scores == scores.max()
    if reweight_method == "max_min":
        return (best | (scores == scores.min())).to(scores.dtype)
    return torch.where(best, 1.0, 0.4).to(scores.dtype)  # max_random


def compute_pf_ppo_reweight_data(data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0) -> DataProto:
    """As many samples as before, drawn with replacement by their score (PF-PPO, arXiv 2409.06957).

    Reads `token_level_scores` [N, T]. `pow`: weight |score|^weight_pow; `max_min`: only the best and the worst;
    `max_random`: the best 1, the others 0.4. All weights 0: every sample weighs the same.
    """
    weights = _weights(data.batch["token_level_scores"].float().sum(-1), reweight_method, weight_pow)
    if not bool(weights.sum() > 0):
        weights = torch.ones_like(weights)
    return data.select_idxs(torch.multinomial(weights, len(weights), replacement=True))
