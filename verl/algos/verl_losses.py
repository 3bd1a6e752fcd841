"""Policy losses with verl's signature: those of the actor, and functions that were written for verl."""

import copy
import functools
from collections import UserDict
from collections.abc import Callable, MutableMapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from verl.algos.aggregation import StepCounts
from verl.algos.policy_loss import LOSS_FUNCTIONS, LossAndMetrics, LossInputs, PolicyLoss
from verl.config.actor import ActorConfig
from verl.utils.registry import Registry

VerlLoss = Callable[..., LossAndMetrics]


def with_attributes(config: Any, **attributes: Any) -> Any:
    """A copy of a config, of the same class, that also has these attributes."""
    config = copy.copy(config)
    for name, value in attributes.items():
        object.__setattr__(config, name, value)
    return config


def from_verl(loss: VerlLoss) -> PolicyLoss:
    """A loss with verl's signature for the actor. It reads the counts from `config.global_batch_info`."""

    @functools.wraps(loss)
    def with_inputs(inputs: LossInputs, config: ActorConfig) -> LossAndMetrics:
        return loss(
            old_log_prob=inputs.old_log_prob,
            log_prob=inputs.log_prob,
            advantages=inputs.advantages,
            response_mask=inputs.response_mask,
            loss_agg_mode=config.loss_agg_mode,
            config=with_attributes(config, global_batch_info=asdict(inputs.counts)),
            rollout_is_weights=inputs.rollout_is_weights,
        )

    with_inputs.verl_loss = loss
    return with_inputs


# defaults of loss_agg_mode other than token-mean
_MODES = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean"}


@functools.cache
def to_verl(loss: PolicyLoss, mode: str = "token-mean") -> VerlLoss:
    """A loss that takes LossInputs, with verl's signature; `mode` is the default of `loss_agg_mode`."""

    def compute_loss(
        old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, loss_agg_mode: str = mode,
        config: Any = None, rollout_is_weights: Tensor | None = None,
    ) -> LossAndMetrics:  # fmt: skip
        counts = StepCounts(**getattr(config, "global_batch_info", {}))
        inputs = LossInputs(
            log_prob, old_log_prob, advantages, response_mask, counts, rollout_is_weights=rollout_is_weights
        )
        return loss(inputs, with_attributes(config, loss_agg_mode=loss_agg_mode))

    compute_loss.__name__ = compute_loss.__qualname__ = f"compute_policy_loss_{loss.__name__.removesuffix('_loss')}"
    compute_loss.__doc__ = loss.__doc__
    return compute_loss


class PluginTable(UserDict[str, Callable]):
    """Any mapping of names to functions with the methods of a Registry, whose error messages it takes over."""

    register, find = Registry.register, Registry.find

    def __init__(self, functions: MutableMapping[str, Callable], registry: Registry) -> None:
        self.data, self.key, self.howto = functions, registry.key, registry.howto


class VerlLosses(PluginTable):
    """The registered losses by name, each with verl's signature; a function that is set becomes a loss of the actor."""

    def __getitem__(self, name: str) -> VerlLoss:
        loss = LOSS_FUNCTIONS[name]
        return getattr(loss, "verl_loss", None) or to_verl(loss, _MODES.get(name, "token-mean"))

    def __setitem__(self, name: str, loss: VerlLoss) -> None:
        LOSS_FUNCTIONS[name] = from_verl(loss)
