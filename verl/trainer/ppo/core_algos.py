"""Compatibility with verl: import path of every advantage, loss and KL function."""
# ruff: noqa: F401, I001 (names to be imported from here, several a line)

import torch

from verl.algos.advantage import (
    ADV_ESTIMATOR_REGISTRY, AdvantageEstimator, Groups, compute_gae_advantage_return, compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage, compute_grpo_passk_outcome_advantage, compute_grpo_vectorized_outcome_advantage,
    compute_opo_outcome_advantage, compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage, compute_remax_outcome_advantage, compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage, estimate_advantages, get_adv_estimator_fn, inputs_of, register_adv_est,
)
from verl.algos.aggregation import LOSS_AGG_MODES, agg_loss
from verl.algos.kl import (
    AdaptiveKLController, FixedKLController, get_kl_controller, kl_penalty, kl_penalty_forward,
)
from verl.algos.policy_loss import (
    POLICY_LOSS_REGISTRY, compute_entropy_loss, compute_policy_loss, compute_policy_loss_bypass_mode,
    compute_policy_loss_cispo, compute_policy_loss_reinforce,
    compute_policy_loss_clip_cov, compute_policy_loss_geo_mean, compute_policy_loss_gpg, compute_policy_loss_gspo,
    compute_policy_loss_kl_cov, compute_policy_loss_sapo, compute_policy_loss_vanilla, compute_value_loss,
    get_policy_loss_fn, register_policy_loss,
)
from verl.algos.reweight import compute_pf_ppo_reweight_data


def compute_rewards(
    token_level_scores: torch.Tensor, old_log_prob: torch.Tensor, ref_log_prob: torch.Tensor, kl_ratio: float
) -> torch.Tensor:
    """Scores minus the KL penalty k1: s - kl_ratio * (old - ref), all [B, T]."""
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)
