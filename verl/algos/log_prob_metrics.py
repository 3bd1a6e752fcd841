"""Differences between two sets of log-probs of the same tokens."""

import torch

from verl.protocol import DataProto


def calculate_log_prob_diff(log_probs1: torch.Tensor, log_probs2: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """|log_probs1 - log_probs2| where mask is 1: three tensors of one shape -> [number of ones]."""
    return (log_probs1 - log_probs2).abs()[mask.bool()]


def pearson_correlation_coefficient(tensor1: torch.Tensor, tensor2: torch.Tensor, mask: torch.Tensor) -> float:
    """Correlation of the entries where mask is 1, three tensors of one shape; 1 if one of the two is constant there."""
    first, second = (tensor.float()[mask.bool()] for tensor in (tensor1, tensor2))
    spread = first.std(correction=0) * second.std(correction=0)
    covariance = ((first - first.mean()) * (second - second.mean())).mean()
    return (covariance / spread).item() if spread > 0 else 1.0


def calculate_debug_metrics(data: DataProto) -> dict[str, float]:
    """How far the rollout's probabilities are from the trained model's, by rollout_log_probs and old_log_probs [B, R].

    Counted are the tokens of response_mask [B, R], or those of the responses in attention_mask [B, P+R] without one, or
    all without either.
    """
    rollout, actor = (data.batch[name].float().exp() for name in ("rollout_log_probs", "old_log_probs"))
    if "response_mask" in data.batch:
        mask = data.batch["response_mask"]
    elif "attention_mask" in data.batch:
        mask = data.batch["attention_mask"][:, -rollout.shape[-1] :]
    else:
        mask = torch.ones_like(rollout)
    if not mask.any():
        return {"training/rollout_probs_diff_valid": 0}
    diff = calculate_log_prob_diff(rollout, actor, mask)
    return {
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": diff.max().item(),
        "training/rollout_probs_diff_mean": diff.mean().item(),
        "training/rollout_probs_diff_std": diff.std(correction=0).item(),
        "training/rollout_actor_probs_pearson_corr": pearson_correlation_coefficient(rollout, actor, mask),
    }
