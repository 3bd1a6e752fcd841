"""Settings of the critic: the value model and its update."""

from dataclasses import dataclass
from typing import Any

from verl.config.actor import LOSS_AGG_MODES
from verl.config.base import BaseConfig
from verl.config.common import RECOMPUTED, SEQUENCE_RANKS, SUM_OVER_RANKS, BaseModelConfig, CheckpointConfig
from verl.config.engine import FSDPEngineConfig
from verl.config.fields import setting
from verl.config.optimizer import FSDPOptimizerConfig, OptimizerConfig
from verl.config.profiler import ProfilerConfig
from verl.utils.problems import raise_if_any


@dataclass
class FSDPCriticModelCfg(BaseModelConfig, section="critic.model"):
    """The value model on FSDP2."""

    use_shm: bool = setting(False, "Copy weights to /dev/shm first, once for all ranks of a machine.")
    enable_activation_offload: bool = setting(False, "Move activations to the CPU between forward and backward.")
    use_remove_padding: bool = setting(False, "Remove padding before the forward.")
    enable_gradient_checkpointing: bool | None = setting(True, RECOMPUTED)
    fsdp_config: FSDPEngineConfig = setting(FSDPEngineConfig, "The critic's engine.")
    lora_rank: int = setting(0, "Rank of LoRA; 0 trains all weights.", low=0)
    lora_alpha: int = setting(16, "Alpha of LoRA: the update is scaled by alpha / rank.", above=0)
    target_modules: Any = setting("all-linear", "Layers that get LoRA: all-linear, or a list of names.")


@dataclass
class CriticConfig(BaseConfig, section="critic"):
    """The update of the value model; enable null means: on where the advantage estimator needs values."""

    ppo_micro_batch_size_per_gpu: int | None = setting(None, "Samples per forward and backward on one rank.", low=1)
    enable: bool | None = setting(None, "Use a critic; null: if the advantage estimator needs one.")
    ppo_mini_batch_size: int = setting(256, "Prompts per optimizer step, over all ranks.", low=1)
    use_dynamic_bsz: bool = setting(False, "Cut micro-batches by tokens.")
    ppo_max_token_len_per_gpu: int = setting(32768, "Tokens per micro-batch of one rank with use_dynamic_bsz.", low=1)
    forward_max_token_len_per_gpu: int = setting(32768, "Tokens per forward on one rank with use_dynamic_bsz.", low=1)
    ppo_epochs: int = setting(1, "Passes over each batch.", low=1)
    data_loader_seed: int = setting(42, "Seed of the order with shuffle=true.", low=0)
    shuffle: bool = setting(False, "Shuffle samples before mini-batches are cut.")
    cliprange_value: float = setting(0.5, "Clip range of the value's change.", low=0)
    loss_agg_mode: str = setting("token-mean", "How token losses are aggregated.", choices=LOSS_AGG_MODES)
    loss_scale_factor: int | None = setting(None, "Divisor of seq-mean-token-sum-norm; null: response length.", low=1)
    ppo_micro_batch_size: int | None = setting(None, SUM_OVER_RANKS, low=1)
    optim: OptimizerConfig = setting(lambda: OptimizerConfig(lr=1e-5), "Optimizer of the critic.")
    model: BaseModelConfig = setting(BaseModelConfig, "The value model.")
    model_config: Any = None
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "Contents of checkpoints.")
    profiler: ProfilerConfig = setting(ProfilerConfig, "Profiling of this role.")

    def validate(self, n_gpus: int, train_batch_size: int) -> None:
        """Raise ValueError where these settings cannot share a batch of `train_batch_size` prompts out to `n_gpus`."""
        from verl.config.batch_sizes import update_problems

        step = ("data.train_batch_size", train_batch_size)
        raise_if_any(update_problems(self, "critic", n_gpus, step, self.get("rollout_n", 1)))


@dataclass
class FSDPCriticConfig(CriticConfig):
    """CriticConfig on FSDP2."""

    forward_micro_batch_size: int | None = setting(None, SUM_OVER_RANKS, low=1)
    forward_micro_batch_size_per_gpu: int | None = setting(None, "Samples per forward on one rank.", low=1)
    ulysses_sequence_parallel_size: int = setting(1, SEQUENCE_RANKS, low=1)
    grad_clip: float = setting(1.0, "Maximum gradient norm.", above=0)
    model: FSDPCriticModelCfg = setting(FSDPCriticModelCfg)
    optim: FSDPOptimizerConfig = setting(lambda: FSDPOptimizerConfig(lr=1e-5))
