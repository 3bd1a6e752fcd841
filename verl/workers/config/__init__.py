"""Compatibility with verl: import path of the settings of workers, which are in `verl.config`."""
# ruff: noqa: F401, I001

from verl.config.common import BaseModelConfig, CheckpointConfig, ModuleConfig, RewardManagerConfig
from verl.config.profiler import ProfilerConfig, TorchMemoryToolConfig
from verl.config.sandbox import SandboxConfig
from verl.config.actor import ActorConfig, FSDPActorConfig, FSDPRefConfig, PolicyLossConfig
from verl.config.critic import CriticConfig, FSDPCriticConfig, FSDPCriticModelCfg
from verl.config.engine import EngineConfig, FSDPEngineConfig
from verl.config.megatron import McoreActorConfig, McoreCriticConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.config.megatron import McoreRefConfig
from verl.config.model import HFModelConfig, PluginConfig
from verl.config.optimizer import FSDPOptimizerConfig, OptimizerConfig, build_optimizer
from verl.config.reward_model import RewardModelConfig, RewardModelModelConfig, SandboxFusionConfig
from verl.config.rollout import AgentLoopConfig, CustomAsyncServerConfig, MultiTurnConfig, PrometheusConfig
from verl.config.rollout import RolloutConfig, SamplingConfig, ServerConfig, TraceConfig
from verl.workers.config.engine import TrainingWorkerConfig, VeOmniEngineConfig
from verl.workers.config.optimizer import VeOmniOptimizerConfig
