"""Compatibility with verl: the functions live in `verl.algos.rollout_correction`."""

from typing import Any

from verl.algos import rollout_correction
from verl.algos.rollout_correction import *  # noqa: F403
from verl.protocol import DataProto


def apply_bypass_mode(batch: DataProto, rollout_corr_config: Any = None, policy_loss_config: Any = None) -> None:
    """As verl.algos.rollout_correction.apply_bypass_mode; also lets the loss of an actor.policy_loss section, which is
    changed in place, correct for the rollout."""
    rollout_correction.apply_bypass_mode(batch)
    if policy_loss_config is not None and rollout_corr_config is not None:
        policy_loss_config.loss_mode = "bypass_mode"
        policy_loss_config.rollout_correction = rollout_corr_config
