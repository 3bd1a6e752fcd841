"""Settings of the trainers."""
# ruff: noqa: F401, I001

from verl.trainer.config.algorithm import AlgoConfig, FilterGroupsConfig, KLControlConfig, RolloutCorrectionConfig
from verl.trainer.config.config import BaseModelConfig, CheckpointConfig, ModuleConfig, ProfileConfig
from verl.trainer.config.config import RewardManagerConfig, TrainerConfig
from verl.trainer.config.data import DataConfig, SamplerConfig
from verl.trainer.config.sft import SFTConfig, SFTDataConfig, SFTModelConfig, SFTOptimConfig, SFTTrainerConfig
