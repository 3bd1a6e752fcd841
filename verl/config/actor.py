"""Settings of the actor: PPO's mini-batches, clipping, losses."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from verl.base_config import BaseConfig
from verl.config.algorithm import KL_CHOICES
from verl.config.common import CheckpointConfig
from verl.config.engine import STRATEGIES, STRATEGY_HINT, FSDPEngineConfig
from verl.config.fields import setting
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig, OptimizerConfig
from verl.planning.problems import raise_if_any
from verl.utils.profiler import ProfilerConfig

MUTABLE = (
    "ppo_mini_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_infer_micro_batch_size_per_gpu",
    "engine", "model_config",
)  # fmt: skip
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass
class PolicyLossConfig(BaseConfig, section="actor.policy_loss", mutable=("loss_mode", "rollout_correction")):
    """Policy loss by registered name, and the numbers that some of them read."""

    loss_mode: str = "vanilla"
    clip_cov_ratio: float = setting(0.0002, low=0, high=1)
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = setting(0.0002, low=0, high=1)
    ppo_kl_coef: float = setting(0.1, low=0)
    rollout_correction: Any = None


@dataclass
class ActorConfig(BaseConfig, section="actor", mutable=(*MUTABLE, "global_batch_info")):
    """The PPO update of the policy; batch sizes count prompts over all ranks, *_per_gpu samples on one rank."""

    strategy: str = setting(MISSING, choices=STRATEGIES, hint=STRATEGY_HINT)
    ppo_mini_batch_size: int = setting(256, low=1)
    ppo_micro_batch_size: int | None = setting(None, low=1)
    ppo_micro_batch_size_per_gpu: int | None = setting(None, low=1)
    ppo_infer_micro_batch_size_per_gpu: int | None = setting(None, low=1)
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: int = setting(16384, low=1)
    ppo_infer_max_token_len_per_gpu: int = setting(16384, low=1)
    clip_ratio: float = setting(0.2, low=0)
    clip_ratio_low: float | None = setting(None, low=0)
    clip_ratio_high: float | None = setting(None, low=0)
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    clip_ratio_c: float = setting(3.0, above=1)
    loss_agg_mode: str = setting("token-mean", choices=LOSS_AGG_MODES)
    loss_scale_factor: int | None = setting(None, low=1)
    entropy_coeff: float = 0
    tau_pos: float = setting(1.0, above=0)
    tau_neg: float = setting(1.05, above=0)
    calculate_entropy: bool = False
    use_kl_loss: bool = False
    use_torch_compile: bool = False
    kl_loss_coef: float = setting(0.001, low=0)
    kl_loss_type: str = setting("low_var_kl", choices=KL_CHOICES)
    ppo_epochs: int = setting(1, low=1)
    shuffle: bool = False
    data_loader_seed: int = setting(42, low=0)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    optim: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-6))
    use_fused_kernels: bool = False
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    engine: Any = field(default_factory=BaseConfig)
    rollout_n: int = setting(MISSING, low=1)
    model_config: HFModelConfig | None = None
    global_batch_info: dict[str, Any] = field(default_factory=dict)
    share_prompt_forward: bool = False

    def validate(self, n_gpus: int, train_batch_size: int, model_config: dict | None = None) -> None:
        """Raise ValueError where these settings cannot share a batch of `train_batch_size` prompts out to `n_gpus`."""
        from verl.planning.batch_arithmetic import actor_problems

        raise_if_any(actor_problems(self, n_gpus=n_gpus, train_batch_size=train_batch_size, rollout_n=self.rollout_n))


@dataclass
class FSDPActorConfig(ActorConfig):
    """ActorConfig on FSDP2."""

    strategy: str = setting("fsdp", choices=STRATEGIES, hint=STRATEGY_HINT)
    grad_clip: float = setting(1.0, above=0)
    ulysses_sequence_parallel_size: int = setting(1, low=1)
    entropy_from_logits_with_chunking: bool = False
    entropy_checkpointing: bool = False
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    optim: FSDPOptimizerConfig = field(default_factory=lambda: FSDPOptimizerConfig(lr=1e-6))
    use_remove_padding: bool = False
    use_rollout_log_probs: bool = False


@dataclass
class FSDPRefConfig(BaseConfig, section="ref"):
    """The reference policy: a forward only."""

    strategy: str = setting("fsdp", choices=STRATEGIES, hint=STRATEGY_HINT)
    use_torch_compile: bool = False
    log_prob_micro_batch_size: int | None = setting(None, low=1)
    log_prob_micro_batch_size_per_gpu: int | None = setting(None, low=1)
    log_prob_use_dynamic_bsz: bool = False
    log_prob_max_token_len_per_gpu: int = setting(16384, low=1)
    ulysses_sequence_parallel_size: int = setting(1, low=1)
    entropy_from_logits_with_chunking: bool = False
    entropy_checkpointing: bool = False
    fsdp_config: FSDPEngineConfig = field(default_factory=lambda: FSDPEngineConfig(forward_only=True))
