"""What to do where the rollout's probabilities are not the trained model's: weights, rejection, and how far they are.

log_ratio is log pi_old - log pi_rollout of each response token, [B, R]; masks are [B, R], 1 = counted. Weights are
truncated importance weights (Ionides 2008; for RL rollouts: Yao et al. 2025, "Your efficient RL framework secretly
brings you off-policy RL training"), or those within two bounds (IcePop, arXiv 2510.18855). Rejection by estimates of
the KL divergence: Li et al. 2025, arXiv 2512.23075; the estimates k1, k2, k3: Schulman 2020, "Approximating KL
divergence".
"""

from typing import Any

import torch
from torch import Tensor

from verl.algos.aggregation import masked_mean, masked_sum
from verl.config.algorithm import is_bounds, rejections
from verl.protocol import DataProto

SAFETY_BOUND = 20.0  # of a log-ratio before it is exponentiated: e^20 is a ratio that no threshold lets through
PREFIX = "rollout_corr/"
#: Estimates of one token's KL divergence by its log-ratio; k1 up to its sign.
_ESTIMATES = {"k1": lambda x: x, "k2": lambda x: x.square() / 2, "k3": lambda x: x.exp() - 1 - x}


def _log_ratio_at(level: str, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The log-ratio that decides for each token, [B, R]: its own, its sequence's sum, or its sequence's mean."""
    if level == "token":
        return log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    total = masked_sum(log_ratio, mask, axis=-1)
    if level == "geometric":
        total = total / mask.sum(-1).clamp(min=1)
    elif level != "sequence":
        raise ValueError(f"algorithm.rollout_correction has no level {level!r}. Known: token, sequence, geometric.")
    return total.clamp(-SAFETY_BOUND, SAFETY_BOUND).unsqueeze(-1).expand_as(log_ratio)


def compute_rollout_correction_weights(
    log_ratio: Tensor, response_mask: Tensor, rollout_is: str = "token", rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Weights of each token or of its sequence, [B, R], without gradient, 0 where nothing is counted.

    `rollout_is_threshold`: an upper bound, which larger ratios are cut to, or a text "lower_upper": ratios outside of
    it have the weight 0. `rollout_is_batch_normalize` divides by the mean weight (over tokens, or over sequences).
    """
    level = _log_ratio_at(rollout_is, log_ratio.detach(), response_mask)
    ratio = level.exp()
    low, high = is_bounds(rollout_is_threshold)
    metrics = compute_is_metrics(ratio, level, response_mask, rollout_is, high)
    if low is None:
        weights = ratio.clamp(max=high) * response_mask
    else:
        weights = ratio * ((ratio >= low) & (ratio <= high)) * response_mask
    if rollout_is_batch_normalize:
        if rollout_is == "token":
            mean = masked_mean(weights, response_mask)
        else:
            counted = response_mask.sum(-1) > 0
            mean = weights.amax(-1)[counted].mean() if counted.any() else torch.ones(())
        metrics["rollout_is_batch_norm_factor"] = mean.item()
        weights = weights / mean.clamp(min=1e-8)
    return weights, metrics


def compute_is_metrics(
    rollout_is_weights: Tensor, log_ratio_for_metrics: Tensor, response_mask: Tensor, rollout_is: str,
    rollout_is_threshold: float,
) -> dict[str, float]:
    """Spread of the weights [B, R] before truncation; the effective sample size (sum w)^2 / (n sum w^2) after it."""
    measures = _spread("rollout_is_", rollout_is_weights, response_mask, rollout_is_threshold, 1 / rollout_is_threshold)
    cut = rollout_is_weights.clamp(max=rollout_is_threshold)[response_mask.bool()]
    size = cut.sum().square() / (len(cut) * cut.square().sum()).clamp(min=1e-12) if len(cut) else torch.ones(())
    return {**measures, "rollout_is_eff_sample_size": size.item()}


def compute_rs_metrics(
    rollout_is_weights: Tensor, log_ratio_for_metrics: Tensor, response_mask: Tensor, rollout_rs: str,
    rollout_rs_threshold: float, rollout_rs_threshold_lower: float,
) -> dict[str, float]:
    """Spread of the ratios [B, R] that rejection looks at."""
    return _spread("rollout_rs_", rollout_is_weights, response_mask, rollout_rs_threshold, rollout_rs_threshold_lower)


def _spread(prefix: str, ratio: Tensor, mask: Tensor, high: float, low: float) -> dict[str, float]:
    """Mean, deviation and extremes of ratio [B, R] over counted tokens and over sequences, shares out of bounds."""
    kept = mask.bool()
    if not kept.any():
        return {}
    tokens = ratio[kept]
    sequences = (masked_sum(ratio, mask, axis=-1) / mask.sum(-1).clamp(min=1))[kept.any(-1)]
    measures = {
        "mean": tokens.mean(), "std": tokens.std(correction=0), "max": tokens.max(), "min": tokens.min(),
        "ratio_fraction_high": (tokens > high).float().mean(), "ratio_fraction_low": (tokens < low).float().mean(),
        "seq_mean": sequences.mean(), "seq_std": sequences.std(correction=0), "seq_max": sequences.max(),
        "seq_min": sequences.min(), "seq_max_deviation": (sequences - 1).abs().max(),
        "seq_fraction_high": (sequences > high).float().mean(), "seq_fraction_low": (sequences < low).float().mean(),
    }  # fmt: skip
    return {prefix + name: value.item() for name, value in measures.items()}


def _divergence(option: str, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """What an option such as seq_mean_k3 compares with its bounds, for each token, [B, R]; of k1 the ratio itself."""
    level, _, estimate = option.rpartition("_")
    bounded = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    values = _ESTIMATES[estimate](bounded if estimate == "k3" else log_ratio)
    if level == "seq_max":
        values = values.masked_fill(~mask.bool(), -torch.inf).amax(-1, keepdim=True).expand_as(values)
    elif level != "token":
        total = masked_sum(values, mask, axis=-1)
        total = total / mask.sum(-1).clamp(min=1) if level == "seq_mean" else total
        values = total.unsqueeze(-1).expand_as(values)
    return values.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp() if estimate == "k1" else values


def compute_rollout_rejection_mask(
    log_ratio: Tensor, response_mask: Tensor, rollout_rs: str = "token",
    rollout_rs_threshold: float | str | None = None, rollout_rs_threshold_lower: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """response_mask without the tokens (or full sequences) that any of the options rejects, [B, R].

    `rollout_rs`: options, separated by commas: token, seq_sum, seq_mean or seq_max with _k1 (the ratio must lie within
    two bounds), _k2 or _k3 (the divergence must not exceed its bound). token, sequence and geometric are token_k1,
    seq_sum_k1 and seq_mean_k1. `rollout_rs_threshold`: a bound for all options or one for each, separated by commas;
    "lower_upper" or an upper bound, whose reciprocal is the lower one. Metrics are those of the first option; with
    several, those of the others have the option's name as well.
    """
    log_ratio, mask, metrics = log_ratio.detach(), response_mask, {}
    options = rejections(rollout_rs, rollout_rs_threshold, rollout_rs_threshold_lower)
    for number, (option, low, high) in enumerate(options):
        value = _divergence(option, log_ratio, response_mask)
        measures = compute_rs_metrics(value, value.log(), response_mask, option, high, low)
        kept = response_mask * ((value >= low) & (value <= high)).to(response_mask.dtype)
        measures |= _left_out(response_mask, kept)
        renamed = {name.replace("rollout_rs_", f"rollout_rs_{option}_"): value for name, value in measures.items()}
        metrics |= renamed if number else measures
        mask = mask * kept
    return mask, {**metrics, **_left_out(response_mask, mask)}


def _left_out(before: Tensor, after: Tensor) -> dict[str, float]:
    """Shares of the tokens, and of the sequences with any, that rejection took from a mask [B, R]."""
    had = before.sum(-1) > 0
    lost = (before - after).sum(-1) > 0
    return {
        "rollout_rs_masked_fraction": ((before - after).sum() / before.sum().clamp(min=1)).item(),
        "rollout_rs_seq_masked_fraction": (lost.sum() / had.sum().clamp(min=1)).item(),
    }


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, rollout_is: str | None = None,
    rollout_is_threshold: float | str | None = 2.0, rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = 2.0,
    rollout_rs_threshold_lower: float | None = None, rollout_token_veto_threshold: float | None = None,
    rollout_is_batch_normalize: bool = False,
) -> tuple[DataProto | None, Tensor, dict[str, float]]:
    """(weights as column rollout_is_weights [B, R] or None, response_mask after rejection and veto, metrics).

    A sequence with any token whose ratio is below `rollout_token_veto_threshold` is left out of the loss.
    """
    log_ratio = (old_log_prob - rollout_log_prob).detach()
    metrics, mask, weights = {}, response_mask, None
    if rollout_is is not None:
        column, measures = compute_rollout_correction_weights(
            log_ratio, response_mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
        )
        metrics.update(measures)
        weights = DataProto.from_dict({"rollout_is_weights": column})
    if rollout_rs is not None:
        bounds = (rollout_rs_threshold, rollout_rs_threshold_lower)
        mask, measures = compute_rollout_rejection_mask(log_ratio, response_mask, rollout_rs, *bounds)
        metrics.update(measures)
    if rollout_token_veto_threshold is not None:
        low = (log_ratio.exp() < rollout_token_veto_threshold) & response_mask.bool()
        vetoed = low.any(-1)
        mask = mask * (~vetoed).unsqueeze(-1).to(mask.dtype)
        had = (response_mask.sum(-1) > 0).sum().clamp(min=1)
        metrics["rollout_is_veto_fraction"] = (vetoed.sum() / had).item()
        metrics["rollout_is_catastrophic_token_fraction"] = (low.sum() / response_mask.sum().clamp(min=1)).item()
    metrics.update(compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask))
    return weights, mask, {PREFIX + name: value for name, value in metrics.items()}


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, Any]:
    """How far the log-probs [B, R] are apart on sequences with a counted token; perplexities are means over sequences.

    kl: mean of log pi_rollout - log pi_old, an estimate of KL(rollout || old); k3_kl: mean of r - 1 - log r with
    r = pi_old / pi_rollout (Schulman 2020); chi2: mean of r^2 minus 1, of tokens and of sequences.
    """
    kept = response_mask.sum(-1) > 0
    if not kept.any():
        return {}
    mask = response_mask[kept]

    def mean_log_prob(log_prob: Tensor) -> Tensor:
        return masked_sum(log_prob.detach()[kept], mask, axis=-1) / mask.sum(-1)

    trained = mean_log_prob(old_log_prob)
    measures = {"training_ppl": (-trained).exp().mean(), "training_log_ppl": -trained.mean()}
    if rollout_log_prob is not None:
        sampled = mean_log_prob(rollout_log_prob)
        log_ratio = (old_log_prob - rollout_log_prob).detach()[kept]
        gap = sampled - trained  # log perplexity of the trained model minus the rollout's
        bounded = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
        total = masked_sum(log_ratio, mask, axis=-1).clamp(-SAFETY_BOUND, SAFETY_BOUND)
        measures |= {
            "rollout_ppl": (-sampled).exp().mean(), "rollout_log_ppl": -sampled.mean(),
            "kl": masked_mean(-log_ratio, mask), "k3_kl": masked_mean(bounded.exp() - 1 - bounded, mask),
            "log_ppl_diff": gap.mean(), "log_ppl_abs_diff": gap.abs().mean(), "log_ppl_diff_max": gap.max(),
            "log_ppl_diff_min": gap.min(), "ppl_ratio": gap.exp().mean(),
            "chi2_token": masked_mean((2 * bounded).exp(), mask) - 1, "chi2_seq": (2 * total).exp().mean() - 1,
        }  # fmt: skip
    return {name: value.item() for name, value in measures.items()}


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """compute_offpolicy_metrics of log-probs and mask [B, R], under their full names."""
    measures = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask)
    return {PREFIX + name: value for name, value in measures.items()}


def settings_of(config) -> dict[str, Any]:
    """The keywords of compute_rollout_correction_and_rejection_mask in an algorithm.rollout_correction section."""
    upper = config.rollout_is_threshold if config.rollout_rs_threshold is None else config.rollout_rs_threshold
    return {
        "rollout_is": config.rollout_is, "rollout_is_threshold": config.rollout_is_threshold,
        "rollout_rs": config.rollout_rs, "rollout_rs_threshold": upper,
        "rollout_rs_threshold_lower": config.rollout_rs_threshold_lower,
        "rollout_token_veto_threshold": config.rollout_token_veto_threshold,
        "rollout_is_batch_normalize": config.rollout_is_batch_normalize,
    }  # fmt: skip


def compute_rollout_correction_and_add_to_batch(batch: DataProto, rollout_corr_config) -> tuple[DataProto, dict]:
    """Weights as rollout_is_weights, rejection in response_mask, both from old_log_probs and rollout_log_probs."""
    columns = batch.batch
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"],
        **settings_of(rollout_corr_config),
    )  # fmt: skip
    batch.batch["response_mask"] = mask
    return (batch if weights is None else batch.union(weights)), metrics


def apply_bypass_mode(batch: DataProto) -> None:
    """old_log_probs become the rollout's: no forward for them, and the ratio of the update is pi / pi_rollout."""
    if "rollout_log_probs" not in batch.batch:
        raise ValueError(
            "the batch has no rollout_log_probs, which algorithm.rollout_correction.bypass_mode=true and "
            "actor_rollout_ref.actor.use_rollout_log_probs=true need. Set "
            "actor_rollout_ref.rollout.calculate_log_probs=true, or set these two to false."
        )
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
