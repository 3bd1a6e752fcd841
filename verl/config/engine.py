"""Settings of the training engine: precision, sharding, offload, batch cuts."""

from dataclasses import dataclass
from typing import Any

from verl.config.base import BaseConfig
from verl.config.common import COMPILED, LAYER_RANKS, SEQUENCE_RANKS, TOKEN_PARTS
from verl.config.fields import setting

DTYPES = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")
STABLE_DTYPES = DTYPES[:4]  # those that need no loss scaling


@dataclass
class EngineConfig(BaseConfig, section="engine"):
    """What every engine needs; *_per_gpu are counts on one rank."""

    param_offload: bool = setting(False, "Keep weights on the CPU while they are not used.")
    optimizer_offload: bool = setting(False, "Keep the optimizer state on the CPU while it is not used.")
    forward_only: bool = setting(False, "The engine only runs forward, without an optimizer.")
    dtype: str = setting(
        "bfloat16",
        "Type of the computation; float32 turns autocast off.",
        choices=STABLE_DTYPES,
        hint="float16 would need loss scaling.",
    )
    use_dynamic_bsz: bool = True
    max_token_len_per_gpu: int | None = setting(None, low=1)
    micro_batch_size_per_gpu: int | None = setting(None, low=1)
    use_remove_padding: bool = True
    seed: int = setting(42, "Seed of this engine's random numbers.", low=0)
    full_determinism: bool = setting(False, "Use deterministic kernels, which are slower; warn where none exists.")


@dataclass
class FSDPEngineConfig(EngineConfig, section="fsdp_config"):
    """FSDP2: `fsdp_size` ranks share one copy of the weights (-1: all), `model_dtype` is the master weights' type.

    `dtype` is the type of autocast; float32 turns autocast off.
    """

    wrap_policy: dict[str, Any] = setting(
        lambda: {"min_num_params": 0}, "Submodules that are sharded on their own; min_num_params 0: by layer class."
    )
    offload_policy: bool = setting(False, "FSDP2's own CPU offload of weights, gradients and optimizer state.")
    reshard_after_forward: bool = setting(True, "Free gathered weights between forward and backward.")
    defer_gradient_sync: bool = setting(
        False, "Exchange gradients after the last micro-batch only; every rank then holds them whole, in float32."
    )
    fsdp_size: int = setting(-1, "Ranks that share one copy of the weights; -1 for all.", low=-1)
    tensor_parallel_size: int = setting(1, LAYER_RANKS, low=1)
    sequence_parallel: bool = setting(False, TOKEN_PARTS)
    forward_prefetch: bool = setting(False, "Gather the next layer's weights while this one computes.")
    model_dtype: str = setting("fp32", "Type of the weights that the optimizer updates.", choices=DTYPES)
    mixed_precision: dict[str, Any] | None = setting(None, "param_dtype, reduce_dtype, buffer_dtype; null: dtype.")
    ulysses_sequence_parallel_size: int = setting(1, SEQUENCE_RANKS, low=1)
    use_torch_compile: bool = setting(False, COMPILED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fsdp_size == 0:
            raise ValueError("fsdp_config.fsdp_size=0 is not a group size; use -1 for all ranks, or a divisor of them.")
