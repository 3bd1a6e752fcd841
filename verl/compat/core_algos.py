"""Compatibility with verl: every advantage, loss and KL function, with verl's signatures."""
# ruff: noqa: F401

import copy
import functools
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from verl.algos import advantage, policy_loss
from verl.algos.advantage import *  # noqa: F403
from verl.algos.advantage import ADV_ESTIMATOR_REGISTRY, AdvantageEstimator
from verl.algos.aggregation import LOSS_AGG_MODES, StepCounts, agg_loss
from verl.algos.kl import *  # noqa: F403
from verl.algos.policy_loss import LOSS_FUNCTIONS, LossAndMetrics, LossInputs, PolicyLoss
from verl.algos.reweight import compute_pf_ppo_reweight_data
from verl.config.actor import ActorConfig
from verl.utils.registry import Registry

VerlLoss = Callable[..., LossAndMetrics]


def _with(config: Any, **attributes: Any) -> Any:
    """A copy of a config, of the same class, that also has these attributes."""
    config = copy.copy(config)
    for name, value in attributes.items():
        object.__setattr__(config, name, value)
    return config


def _from_verl(loss: VerlLoss) -> PolicyLoss:
    """A loss with verl's signature for the actor. It reads the counts from `config.global_batch_info`."""

    @functools.wraps(loss)
    def with_inputs(inputs: LossInputs, config: ActorConfig) -> LossAndMetrics:
        return loss(
            old_log_prob=inputs.old_log_prob,
            log_prob=inputs.log_prob,
            advantages=inputs.advantages,
            response_mask=inputs.response_mask,
            loss_agg_mode=config.loss_agg_mode,
            config=_with(config, global_batch_info=asdict(inputs.counts)),
            rollout_is_weights=inputs.rollout_is_weights,
        )

    with_inputs.verl_loss = loss
    return with_inputs


# defaults of loss_agg_mode other than token-mean
_MODES = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean"}


@functools.cache
def _to_verl(loss: PolicyLoss, mode: str = "token-mean") -> VerlLoss:
    """A loss that takes LossInputs, with verl's signature; `mode` is the default of `loss_agg_mode`."""

    def compute_loss(
        old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, loss_agg_mode: str = mode,
        config: Any = None, rollout_is_weights: Tensor | None = None,
    ) -> LossAndMetrics:  # fmt: skip
        counts = StepCounts(**getattr(config, "global_batch_info", {}))
        inputs = LossInputs(
            log_prob, old_log_prob, advantages, response_mask, counts, rollout_is_weights=rollout_is_weights
        )
        return loss(inputs, _with(config, loss_agg_mode=loss_agg_mode))

    compute_loss.__name__ = compute_loss.__qualname__ = f"compute_policy_loss_{loss.__name__.removesuffix('_loss')}"
    compute_loss.__doc__ = loss.__doc__
    return compute_loss


class _Table(UserDict[str, Callable]):
    """A mapping, by which a program may have replaced that of this module, with the methods of a Registry."""

    register, find = Registry.register, Registry.find

    def __init__(self, functions: MutableMapping[str, Callable], registry: Registry) -> None:
        self.data, self.key, self.howto = functions, registry.key, registry.howto


class _VerlLosses(_Table):
    """The registered losses by name, each with verl's signature."""

    def __getitem__(self, name: str) -> VerlLoss:
        loss = LOSS_FUNCTIONS[name]
        return getattr(loss, "verl_loss", None) or _to_verl(loss, _MODES.get(name, "token-mean"))

    def __setitem__(self, name: str, loss: VerlLoss) -> None:
        LOSS_FUNCTIONS[name] = _from_verl(loss)


POLICY_LOSS_REGISTRY: MutableMapping[str, VerlLoss] = _VerlLosses(LOSS_FUNCTIONS, LOSS_FUNCTIONS)


def register_adv_est(name_or_enum: str | AdvantageEstimator) -> Callable:
    """Decorator: enter an estimator into the table ADV_ESTIMATOR_REGISTRY of this module, which may be replaced."""
    return _Table(ADV_ESTIMATOR_REGISTRY, advantage.ADV_ESTIMATOR_REGISTRY).register(name_or_enum)


def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> Callable:
    """The estimator of that name in the table of this module; ValueError if there is none."""
    return _Table(ADV_ESTIMATOR_REGISTRY, advantage.ADV_ESTIMATOR_REGISTRY).find(name_or_enum)


def register_policy_loss(name: str) -> Callable[[VerlLoss], VerlLoss]:
    """Decorator: enter a loss with verl's signature into the table POLICY_LOSS_REGISTRY of this module."""
    return _Table(POLICY_LOSS_REGISTRY, LOSS_FUNCTIONS).register(name)


def get_policy_loss_fn(name: str) -> VerlLoss:
    """The loss of that name in the table of this module; ValueError if there is none."""
    return _Table(POLICY_LOSS_REGISTRY, LOSS_FUNCTIONS).find(name)


compute_policy_loss_vanilla = POLICY_LOSS_REGISTRY["vanilla"]
compute_policy_loss_gspo = POLICY_LOSS_REGISTRY["gspo"]
compute_policy_loss_sapo = POLICY_LOSS_REGISTRY["sapo"]
compute_policy_loss_gpg = POLICY_LOSS_REGISTRY["gpg"]
compute_policy_loss_cispo = POLICY_LOSS_REGISTRY["cispo"]
compute_policy_loss_clip_cov = POLICY_LOSS_REGISTRY["clip_cov"]
compute_policy_loss_kl_cov = POLICY_LOSS_REGISTRY["kl_cov"]
compute_policy_loss_geo_mean = POLICY_LOSS_REGISTRY["geo_mean"]
compute_policy_loss_bypass_mode = POLICY_LOSS_REGISTRY["bypass_mode"]
compute_policy_loss_dppo_tv = POLICY_LOSS_REGISTRY["dppo_tv"]
compute_policy_loss_dppo_kl = POLICY_LOSS_REGISTRY["dppo_kl"]
compute_policy_loss_dro = POLICY_LOSS_REGISTRY["dro"]


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum", config: Any = None, rollout_is_weights: Tensor | None = None,
) -> LossAndMetrics:  # fmt: skip
    """`verl.algos.policy_loss.reinforce_loss` with verl's signature."""
    return _to_verl(policy_loss.reinforce_loss)(
        rollout_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )


def compute_policy_loss(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, cliprange: float | None = None,
    cliprange_low: float | None = None, cliprange_high: float | None = None, clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The vanilla loss without a config: (loss, clipfrac, ppo_kl, clipfrac_lower), each a scalar tensor."""
    low, high = (cliprange if bound is None else bound for bound in (cliprange_low, cliprange_high))
    if low is None or high is None:
        raise ValueError("compute_policy_loss needs `cliprange`, or both `cliprange_low` and `cliprange_high`.")
    config = SimpleNamespace(clip_ratio=cliprange, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=clip_ratio_c)
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config
    )
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    return loss, *(log_prob.new_tensor(metrics[name]) for name in names)


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """Aggregated entropy of the next-token distribution: logits [B, T, V], response_mask [B, T] -> scalar."""
    log_probs = logits.log_softmax(-1)
    return agg_loss(-(log_probs.exp() * log_probs).sum(-1), response_mask, loss_agg_mode)


def compute_value_loss(
    vpreds: Tensor, returns: Tensor, values: Tensor, response_mask: Tensor, cliprange_value: float,
    loss_agg_mode: str = "token-mean", global_batch_info: Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`verl.algos.policy_loss.value_loss`; `global_batch_info` are the counts of the full mini-batch."""
    config = SimpleNamespace(cliprange_value=cliprange_value, loss_agg_mode=loss_agg_mode)
    counts = StepCounts(**(global_batch_info or {}))
    return policy_loss.value_loss(vpreds, returns, values, response_mask, counts, config)


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """Scores minus the KL penalty k1: s - kl_ratio * (old - ref), all [B, T]."""
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)
