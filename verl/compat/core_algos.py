"""Compatibility with verl: every advantage, loss and KL function, with verl's signatures."""
# ruff: noqa: F401

from collections.abc import Callable, Mapping, MutableMapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from verl.algos import advantage, policy_loss
from verl.algos.advantage import *  # noqa: F403
from verl.algos.advantage import ADV_ESTIMATOR_REGISTRY, AdvantageEstimator
from verl.algos.aggregation import LOSS_AGG_MODES, StepCounts, agg_loss
from verl.algos.kl import *  # noqa: F403
from verl.algos.policy_loss import LOSS_FUNCTIONS, LossAndMetrics
from verl.algos.reweight import compute_pf_ppo_reweight_data
from verl.algos.verl_losses import PluginTable, VerlLoss, VerlLosses, to_verl
from verl.compat.torch_functional import entropy_from_logits

# PluginTable(X, Y): table X of this module, which users may replace, with the methods and messages of registry Y
POLICY_LOSS_REGISTRY: MutableMapping[str, VerlLoss] = VerlLosses(LOSS_FUNCTIONS, LOSS_FUNCTIONS)


def register_adv_est(name_or_enum: str | AdvantageEstimator) -> Callable:
    """Decorator: enter an estimator into ADV_ESTIMATOR_REGISTRY."""
    return PluginTable(ADV_ESTIMATOR_REGISTRY, advantage.ADV_ESTIMATOR_REGISTRY).register(name_or_enum)


def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> Callable:
    """The estimator of that name in ADV_ESTIMATOR_REGISTRY; ValueError if there is none."""
    return PluginTable(ADV_ESTIMATOR_REGISTRY, advantage.ADV_ESTIMATOR_REGISTRY).find(name_or_enum)


def register_policy_loss(name: str) -> Callable[[VerlLoss], VerlLoss]:
    """Decorator: enter a loss with verl's signature into POLICY_LOSS_REGISTRY."""
    return PluginTable(POLICY_LOSS_REGISTRY, LOSS_FUNCTIONS).register(name)


def get_policy_loss_fn(name: str) -> VerlLoss:
    """The loss of that name in POLICY_LOSS_REGISTRY; ValueError if there is none."""
    return PluginTable(POLICY_LOSS_REGISTRY, LOSS_FUNCTIONS).find(name)


# compute_policy_loss_vanilla, compute_policy_loss_gspo and so on: each registered loss with verl's signature
globals().update({f"compute_policy_loss_{name}": loss for name, loss in POLICY_LOSS_REGISTRY.items()})


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum", config: Any = None, rollout_is_weights: Tensor | None = None,
) -> LossAndMetrics:  # fmt: skip
    """REINFORCE, which is not registered: tensors [B, T], response_mask 1 = counted -> (scalar, metrics)."""
    return to_verl(policy_loss.reinforce_loss)(
        rollout_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )


def compute_policy_loss(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, cliprange: float | None = None,
    cliprange_low: float | None = None, cliprange_high: float | None = None, clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """PPO's loss (vanilla) without a config: tensors [B, T] -> (loss, clipfrac, ppo_kl, clipfrac_lower), scalars."""
    low, high = (cliprange if bound is None else bound for bound in (cliprange_low, cliprange_high))
    if low is None or high is None:
        raise ValueError("compute_policy_loss needs `cliprange`, or both `cliprange_low` and `cliprange_high`.")
    config = SimpleNamespace(clip_ratio=cliprange, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=clip_ratio_c)
    vanilla = to_verl(policy_loss.vanilla_loss)  # a registered "vanilla" may have other metrics
    loss, metrics = vanilla(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config)
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    return loss, *(log_prob.new_tensor(metrics[name]) for name in names)


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """Aggregated entropy of the next token: logits [B, T, V], response_mask [B, T] (1 = counted) -> scalar."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)


def compute_value_loss(
    vpreds: Tensor, returns: Tensor, values: Tensor, response_mask: Tensor, cliprange_value: float,
    loss_agg_mode: str = "token-mean", global_batch_info: Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`verl.algos.policy_loss.value_loss`. `global_batch_info`: fields of StepCounts; None counts this batch."""
    config = SimpleNamespace(cliprange_value=cliprange_value, loss_agg_mode=loss_agg_mode)
    counts = StepCounts(**(global_batch_info or {}))
    return policy_loss.value_loss(vpreds, returns, values, response_mask, counts, config)


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """Scores minus the KL penalty k1: s - kl_ratio * (old - ref), all [B, T]."""
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)
