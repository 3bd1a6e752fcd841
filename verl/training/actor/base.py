"""The interface of an actor: log-probs of a batch, one policy update on a batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from tensordict import TensorDict

from verl.config.actor import ActorConfig, AuxiliaryLossConfig
from verl.config.fields import refuse_unknown
from verl.protocol import DataProto
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.registry import Registry, installed_plugins


class BasePPOActor(ABC):
    """Runs on every rank over that rank's part of the batch."""

    def __init__(self, config: ActorConfig):
        self.config = config

    @abstractmethod
    def compute_log_prob(self, data: DataProto) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(log_probs [B, R], entropys [B, R] or None) of the batch's responses."""

    @abstractmethod
    def update_policy(self, data: DataProto) -> dict:
        """Trains on the batch; returns metrics, each a list of one value per mini-batch."""


class AuxiliaryLoss(ABC):
    """A loss that every update of the actor adds to the policy loss, with a forward and backward of its own.

    `settings` is an object of `settings_type` with the values under the loss's name in actor.auxiliary_losses.
    """

    settings_type: type[AuxiliaryLossConfig] = AuxiliaryLossConfig

    #: whether `backward` runs between the policy's forward, whose keys and values it needs, and the policy's backward;
    #: only one loss of an actor can have them
    needs_cache = False

    @abstractmethod
    def __init__(self, settings: AuxiliaryLossConfig, config: ActorConfig, engine: Any) -> None: ...

    def begin(self, mini: DataProto) -> None:  # noqa: B027
        """Called by all ranks with their rows of a mini-batch, before these are cut into micro-batches."""

    def new_cache(self) -> Any:
        """What the policy's forward on the next micro-batch stores its keys and values in, if `needs_cache`: a
        transformers cache."""
        return None

    @abstractmethod
    def backward(self, batch: TensorDict) -> dict[str, float]:
        """Add the gradient of a micro-batch [b, P+R]; metrics that are summed over micro-batches."""


# name -> class, or of installed packages its dotted name, which is imported if the loss has settings
_AUXILIARY_LOSSES: Registry[str, type[AuxiliaryLoss] | str] = Registry(
    "actor_rollout_ref.actor.auxiliary_losses",
    "Your own: register it with register_auxiliary_loss in a module named by actor_rollout_ref.model.external_lib.",
)
_AUXILIARY_LOSSES |= installed_plugins("auxiliary_losses")


def register_auxiliary_loss(name: str) -> Callable[[type[AuxiliaryLoss]], type[AuxiliaryLoss]]:
    """Class decorator: add an AuxiliaryLoss to the update of every actor."""
    return _AUXILIARY_LOSSES.register(name)


def enabled_losses(config: ActorConfig) -> dict[str, tuple[type[AuxiliaryLoss], AuxiliaryLossConfig]]:
    """Class and settings of the losses whose `coef` is not 0, by name.

    Raises ValueError for an unknown name in actor.auxiliary_losses, or a wrong setting of a loss.
    """
    for name in config.auxiliary_losses:
        _AUXILIARY_LOSSES.find(name)
    enabled = {}
    for name, entry in _AUXILIARY_LOSSES.items():
        given = config.auxiliary_losses.get(name)
        if isinstance(entry, str):
            if given is None:
                continue
            entry = load_class_from_fqn(entry, "auxiliary loss")
        kind = entry.settings_type
        refuse_unknown(f"{_AUXILIARY_LOSSES.key}.{name}", given or {}, [field.name for field in fields(kind)])
        settings = kind(**(given or {}))
        if settings.coef:
            enabled[name] = entry, settings
    return enabled


def auxiliary_losses(config: ActorConfig, engine: Any) -> list[AuxiliaryLoss]:
    """The losses that the actor's settings turn on; ValueError if several of them need the policy's cache."""
    losses = {name: kind(settings, config, engine) for name, (kind, settings) in enabled_losses(config).items()}
    if len(caching := [name for name, loss in losses.items() if loss.needs_cache]) > 1:
        raise ValueError(
            f"the auxiliary losses {', '.join(caching)} need the keys and values of the policy's forward "
            f"(needs_cache), which one loss can have; set {_AUXILIARY_LOSSES.key}.{caching[1]}.coef=0."
        )
    return list(losses.values())
