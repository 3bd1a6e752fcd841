"""Compatibility with verl: import path of `verl.config.engine`, and settings that nothing here reads."""

from dataclasses import dataclass
from typing import Any

from verl.config.base import BaseConfig
from verl.config.common import CheckpointConfig
from verl.config.engine import *  # noqa: F403
from verl.config.engine import EngineConfig
from verl.config.fields import setting
from verl.config.megatron import McoreEngineConfig  # noqa: F401
from verl.config.optimizer import OptimizerConfig
from verl.config.profiler import ProfilerConfig


@dataclass
class TrainingWorkerConfig(BaseConfig, section="training_worker"):
    """Everything one training worker is built from."""

    model_type: str | None = None
    model_config: Any = None
    engine_config: EngineConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    checkpoint_config: CheckpointConfig | None = None
    profiler_config: ProfilerConfig | None = None


@dataclass
class VeOmniEngineConfig(EngineConfig, section="veomni"):
    """verl's settings of a VeOmni engine, which no trainer here builds."""

    strategy: str | None = setting("veomni", choices=("veomni",))
    wrap_policy: dict[str, Any] = setting(dict)
    offload_policy: bool = False
    reshard_after_forward: bool = True
    forward_prefetch: bool = False
    use_orig_params: bool = False
    entropy_from_logits_with_chunking: bool = False
    use_torch_compile: bool = True
    entropy_checkpointing: bool = False
    data_parallel_size: int = 1
    data_parallel_replicate_size: int = 1
    data_parallel_shard_size: int = 1
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    ulysses_parallel_size: int = 1
    data_parallel_mode: str = "fsdp"
    mixed_precision: bool = False
    init_device: str = "meta"
    enable_full_shard: bool = False
    ckpt_manager: str = "dcp"
    load_checkpoint_path: str | None = None
    enable_fsdp_offload: bool = False
    enable_reentrant: bool = False
    attn_implementation: str | None = "flash_attention_2"
    moe_implementation: str | None = "eager"
    force_use_huggingface: bool = False
    activation_gpu_limit: float = 0.0
    basic_modules: list[str] | None = setting(list)
