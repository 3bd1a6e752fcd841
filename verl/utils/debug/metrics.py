"""How far two sets of log-probs of the same tokens are apart."""

from verl.protocol import DataProto


def calculate_debug_metrics(data: DataProto) -> dict[str, float]:
    """How far the rollout's probabilities are from the trained model's, on counted tokens ([B, R] each)."""
    mask = data.batch["response_mask"].bool()
    if not mask.any():
        return {"training/rollout_probs_diff_valid": 0}
    rollout = data.batch["rollout_log_probs"].float().exp()[mask]
    actor = data.batch["old_log_probs"].float().exp()[mask]
    diff = (rollout - actor).abs()
    spread = rollout.std(correction=0) * actor.std(correction=0)
    covariance = ((rollout - rollout.mean()) * (actor - actor.mean())).mean()
    return {
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": diff.max().item(),
        "training/rollout_probs_diff_mean": diff.mean().item(),
        "training/rollout_probs_diff_std": diff.std(correction=0).item(),
        "training/rollout_actor_probs_pearson_corr": (covariance / spread).item() if spread > 0 else 1.0,
    }
