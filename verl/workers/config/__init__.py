"""Settings of the workers, one dataclass a component."""
# ruff: noqa: F401, I001

from verl.trainer.config.config import BaseModelConfig, CheckpointConfig, ModuleConfig, RewardManagerConfig
from verl.utils.profiler import ProfilerConfig
from verl.utils.sandbox.config import SandboxConfig
from verl.workers.config.actor import ActorConfig, FSDPActorConfig, FSDPRefConfig, PolicyLossConfig
from verl.workers.config.critic import CriticConfig, FSDPCriticConfig, FSDPCriticModelCfg
from verl.workers.config.engine import EngineConfig, FSDPEngineConfig, TrainingWorkerConfig
from verl.workers.config.model import HFModelConfig, PluginConfig
from verl.workers.config.optimizer import FSDPOptimizerConfig, OptimizerConfig, build_optimizer
from verl.workers.config.reward_model import RewardModelConfig, RewardModelModelConfig, SandboxFusionConfig
from verl.workers.config.rollout import AgentLoopConfig, CustomAsyncServerConfig, MultiTurnConfig, PrometheusConfig
from verl.workers.config.rollout import RolloutConfig, SamplingConfig, ServerConfig, TraceConfig
