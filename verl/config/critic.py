"""Settings of the critic: the value model and its update."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from verl.base_config import BaseConfig
from verl.config.actor import LOSS_AGG_MODES, MUTABLE
from verl.config.common import BaseModelConfig, CheckpointConfig
from verl.config.engine import STRATEGIES, STRATEGY_HINT, FSDPEngineConfig
from verl.config.fields import setting
from verl.config.optimizer import FSDPOptimizerConfig, OptimizerConfig
from verl.planning.problems import raise_if_any
from verl.utils.profiler import ProfilerConfig


@dataclass
class FSDPCriticModelCfg(BaseModelConfig, section="critic.model"):
    """The value model on FSDP2."""

    use_shm: bool = False
    enable_activation_offload: bool = False
    use_remove_padding: bool = False
    enable_gradient_checkpointing: bool = True
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    lora_rank: int = setting(0, low=0)
    lora_alpha: int = setting(16, above=0)
    target_modules: Any = "all-linear"


@dataclass
class CriticConfig(BaseConfig, section="critic", mutable=MUTABLE):
    """The update of the value model; enable null means: on where the advantage estimator needs values."""

    strategy: str = setting(MISSING, choices=STRATEGIES, hint=STRATEGY_HINT)
    ppo_micro_batch_size_per_gpu: int | None = setting(None, low=1)
    enable: bool | None = None
    rollout_n: int = setting(1, low=1)
    ppo_mini_batch_size: int = setting(256, low=1)
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: int = setting(32768, low=1)
    forward_max_token_len_per_gpu: int = setting(32768, low=1)
    ppo_infer_micro_batch_size_per_gpu: int | None = setting(None, low=1)
    ppo_infer_max_token_len_per_gpu: int = setting(32768, low=1)
    ppo_epochs: int = setting(1, low=1)
    data_loader_seed: int = setting(42, low=0)
    shuffle: bool = False
    cliprange_value: float = setting(0.5, low=0)
    loss_agg_mode: str = setting("token-mean", choices=LOSS_AGG_MODES)
    ppo_micro_batch_size: int | None = setting(None, low=1)
    engine: Any = field(default_factory=BaseConfig)
    optim: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    model: BaseModelConfig = field(default_factory=BaseModelConfig)
    model_config: Any = None
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)

    def validate(self, n_gpus: int, train_batch_size: int) -> None:
        """Raise ValueError where these settings cannot share a batch of `train_batch_size` prompts out to `n_gpus`."""
        from verl.planning.batch_arithmetic import critic_problems

        raise_if_any(critic_problems(self, n_gpus=n_gpus, train_batch_size=train_batch_size, rollout_n=self.rollout_n))


@dataclass
class FSDPCriticConfig(CriticConfig):
    """CriticConfig on FSDP2."""

    strategy: str = setting("fsdp", choices=STRATEGIES, hint=STRATEGY_HINT)
    forward_micro_batch_size: int | None = setting(None, low=1)
    forward_micro_batch_size_per_gpu: int | None = setting(None, low=1)
    ulysses_sequence_parallel_size: int = setting(1, low=1)
    grad_clip: float = setting(1.0, above=0)
    model: FSDPCriticModelCfg = field(default_factory=FSDPCriticModelCfg)
    optim: FSDPOptimizerConfig = field(default_factory=lambda: FSDPOptimizerConfig(lr=1e-5))
