"""Translates the SFT configuration into the settings of the engine."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from verl.config.common import CheckpointConfig
from verl.config.compose import to_plain
from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.config.sft import EACH_EPOCH, SFTConfig, SFTOptimConfig
from verl.utils.fs import copy_to_local

EngineParts = tuple[HFModelConfig, FSDPEngineConfig, FSDPOptimizerConfig, CheckpointConfig]


def model_settings(config: SFTConfig, tokenizer: Any = None) -> HFModelConfig:
    """The engine's model settings, of the `model` section."""
    model = to_plain(config.model)
    same_names = ("external_lib", "enable_gradient_checkpointing", "trust_remote_code", "lora_rank", "lora_alpha",
                  "target_modules", "use_liger")  # fmt: skip
    return HFModelConfig(
        path=copy_to_local(model["partial_pretrain"], use_shm=model["use_shm"]),
        use_remove_padding=config.use_remove_padding or config.data.packing,
        tokenizer=tokenizer,
        **{name: model[name] for name in same_names},
    )


def samples_per_forward(data: Mapping[str, Any], groups: int) -> int:
    """Samples per forward of each of the `groups` of ranks; the ranks of a group compute on the same rows.

    The older key data.micro_batch_size is the sum over all groups. Raises ValueError if `groups` does not divide it.
    """
    of_all_groups = data["micro_batch_size"]
    if of_all_groups is None:
        return data["micro_batch_size_per_gpu"]
    if of_all_groups % groups:
        raise ValueError(
            f"data.micro_batch_size={of_all_groups} cannot be shared evenly by {groups} groups of ranks. Set "
            f"data.micro_batch_size_per_gpu={max(1, of_all_groups // groups)} in its place."
        )
    return of_all_groups // groups


def tokens_per_forward(data: Mapping[str, Any], samples: int) -> int:
    """Maximum tokens of a packed forward of one rank; `samples`: how many a forward has without packing."""
    return data["max_token_len_per_gpu"] or samples * data["max_length"]


def steps_of_epochs(trainer: Mapping[str, Any], epoch_steps: int) -> dict[str, int]:
    """{key: steps} of the frequencies in `trainer` that are set to once each epoch, of `epoch_steps` steps."""
    return {name: epoch_steps for name in ("test_freq", "save_freq") if trainer[name] == EACH_EPOCH}


def engine_parts(config: SFTConfig, tokenizer: Any, total_steps: int) -> EngineParts:
    """Model, engine, optimizer and checkpoint settings of a run of `total_steps`."""
    fsdp = to_plain(config.model.fsdp_config)
    optim = to_plain(config.optim)
    checkpoint = to_plain(config.trainer.checkpoint)
    checkpoint.pop("_target_", None)
    same_names = ("model_dtype", "dtype", "wrap_policy", "fsdp_size", "tensor_parallel_size", "sequence_parallel",
                  "full_determinism")  # fmt: skip
    engine = FSDPEngineConfig(
        offload_policy=fsdp["cpu_offload"],
        param_offload=fsdp["offload_params"],
        optimizer_offload=fsdp["offload_params"],
        ulysses_sequence_parallel_size=config.ulysses_sequence_parallel_size,
        seed=config.trainer.seed,
        **{name: fsdp[name] for name in same_names},
    )
    same = {f.name: optim[f.name] for f in fields(SFTOptimConfig) if f.name not in ("_target_", "lr_scheduler")}
    optimizer = FSDPOptimizerConfig(**same, lr_scheduler_type=optim["lr_scheduler"], total_training_steps=total_steps)
    return model_settings(config, tokenizer), engine, optimizer, CheckpointConfig(**checkpoint)
