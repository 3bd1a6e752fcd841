"""Settings of the trainers."""

from verl.trainer.config.algorithm import AlgoConfig, FilterGroupsConfig, KLControlConfig, RolloutCorrectionConfig
from verl.trainer.config.config import (
    BaseModelConfig,
    CheckpointConfig,
    ModuleConfig,
    ProfileConfig,
    RewardManagerConfig,
)
from verl.trainer.config.data import DataConfig, SamplerConfig
from verl.trainer.config.trainer import TrainerConfig

__all__ = [
    "AlgoConfig",
    "BaseModelConfig",
    "CheckpointConfig",
    "DataConfig",
    "FilterGroupsConfig",
    "KLControlConfig",
    "ModuleConfig",
    "ProfileConfig",
    "RewardManagerConfig",
    "RolloutCorrectionConfig",
    "SamplerConfig",
    "TrainerConfig",
]
