"""Compatibility with verl: import path of the settings of trainers, which are in `verl.config`; has the yaml files."""
# ruff: noqa: F401, I001

from verl.config.algorithm import AlgoConfig, FilterGroupsConfig, KLControlConfig, RolloutCorrectionConfig
from verl.config.common import BaseModelConfig, CheckpointConfig, ModuleConfig, ProfileConfig
from verl.config.common import RewardManagerConfig, TrainerConfig
from verl.config.data import DataConfig, SamplerConfig
from verl.config.sft import SFTConfig, SFTDataConfig, SFTModelConfig, SFTOptimConfig, SFTTrainerConfig
