"""Compatibility with verl: import path of `verl.config.optimizer`, and settings that nothing here reads."""

from dataclasses import dataclass

from verl.config.megatron import McoreOptimizerConfig  # noqa: F401
from verl.config.optimizer import *  # noqa: F403
from verl.config.optimizer import OptimizerConfig


@dataclass
class VeOmniOptimizerConfig(OptimizerConfig):
    """verl's settings of an optimizer of a VeOmni engine, which no trainer here builds."""

    lr_scheduler_type: str = "constant"
    override_optimizer_config: dict | None = None
