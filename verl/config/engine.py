"""Settings of the training engine: precision, sharding, offload, batch cuts."""

from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig
from verl.config.common import CheckpointConfig
from verl.config.fields import setting
from verl.config.optimizer import OptimizerConfig
from verl.utils.profiler import ProfilerConfig

MUTABLE = (
    "use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu", "infer_max_token_len_per_gpu",
    "infer_micro_batch_size_per_gpu", "use_fused_kernels", "use_remove_padding",
)  # fmt: skip
DTYPES = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")
STRATEGIES = ("fsdp", "fsdp2")
STRATEGY_HINT = "Both mean FSDP2 here; Megatron is not supported."


@dataclass
class EngineConfig(BaseConfig, section="engine", mutable=MUTABLE):
    """What every engine needs; *_per_gpu are counts on one rank."""

    param_offload: bool = False
    optimizer_offload: bool = False
    grad_offload: bool = False
    forward_only: bool = False
    strategy: str | None = setting(None, choices=STRATEGIES, hint=STRATEGY_HINT)
    dtype: str = setting("bfloat16", choices=DTYPES[:4], hint="float16 would need loss scaling.")
    use_dynamic_bsz: bool = True
    max_token_len_per_gpu: int | None = setting(None, low=1)
    micro_batch_size_per_gpu: int | None = setting(None, low=1)
    infer_max_token_len_per_gpu: int | None = setting(None, low=1)
    infer_micro_batch_size_per_gpu: int | None = setting(None, low=1)
    use_fused_kernels: bool = False
    use_remove_padding: bool = True
    seed: int = setting(42, low=0)
    full_determinism: bool = False


@dataclass
class FSDPEngineConfig(EngineConfig, section="fsdp_config"):
    """FSDP2: `fsdp_size` ranks share one copy of the weights (-1: all), `model_dtype` is the master weights' type.

    `dtype` is the type of autocast; float32 turns autocast off.
    """

    wrap_policy: dict[str, Any] = field(default_factory=lambda: {"min_num_params": 0})
    offload_policy: bool = False
    reshard_after_forward: bool = True
    fsdp_size: int = setting(-1, low=-1)
    forward_prefetch: bool = False
    model_dtype: str = setting("fp32", choices=DTYPES)
    use_orig_params: bool = False
    mixed_precision: dict[str, Any] | None = None
    ulysses_sequence_parallel_size: int = setting(1, low=1)
    entropy_from_logits_with_chunking: bool = False
    use_torch_compile: bool = False
    entropy_checkpointing: bool = False
    strategy: str | None = setting("fsdp", choices=STRATEGIES, hint=STRATEGY_HINT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fsdp_size == 0:
            raise ValueError("fsdp_config.fsdp_size=0 is no group size; use -1 for all ranks, or a divisor of them.")


@dataclass
class TrainingWorkerConfig(BaseConfig, section="training_worker"):
    """Everything one training worker is built from."""

    model_type: str | None = None
    model_config: Any = None
    engine_config: EngineConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    checkpoint_config: CheckpointConfig | None = None
    profiler_config: ProfilerConfig | None = None
