"""Builds what an engine holds: the model with its adapters, the schedule of the learning rate."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from loguru import logger
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from verl.config.engine import FSDPEngineConfig
from verl.config.fields import refuse_unknown
from verl.config.model import HFModelConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.models.loading import get_lora_rank_from_adapter, get_model_loader, load_without_weights, torch_dtype_of
from verl.models.stored_weights import StoredWeights
from verl.training import lr_schedules
from verl.training.parallel.sharding import is_placeholder
from verl.training.peft_weights import adapted_layers
from verl.utils.weight_files import safetensors_of, tensor_shapes

VALUES_IN_LAYER = 34  # that a layer keeps of each token and hidden unit for the backward pass


def build_module(
    model_config: HFModelConfig, engine_config: FSDPEngineConfig, *, trains: bool
) -> tuple[nn.Module, StoredWeights | None]:
    """The model with adapters, on the CPU, and where its weights are: its placeholders are filled when it is sharded.

    Parameters that are not stored are the same on every rank, since every rank uses the same seed. A loader of the
    user's own gives all weights, without a second value.
    """
    dtype = torch_dtype_of(engine_config.model_dtype, "fsdp_config.model_dtype")
    module, stored = load_without_weights(model_config, dtype) or (
        get_model_loader(model_config.loader.name)(model_config, dtype, **model_config.loader.kwargs),
        None,
    )
    if model_config.use_liger:
        from transformers.integrations.liger import apply_liger_kernel  # names the package if it is not installed

        for m in outermost_pretrained(module):  # log-probs and losses are computed from hidden states
            apply_liger_kernel(m, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    module = add_adapters(module, model_config, trains=trains)
    if trains and model_config.enable_gradient_checkpointing:
        checkpoint_layers(module, True)
    # FSDP shards one dtype per group; an adapter that peft made in float32 on a bfloat16 base follows the base. A part
    # that stays frozen next to trained ones keeps the type in which its loader holds it. Buffers keep theirs: rotary
    # frequencies in bfloat16 would be wrong by whole turns at a position of some thousands.
    parts = list(module.children())
    trained = [part for part in parts if any(p.requires_grad for p in part.parameters())]
    for part in trained if trains and len(trained) < len(parts) else [module]:
        for parameter in part.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    return module, stored


def add_adapters(module: nn.Module, model_config: HFModelConfig, *, trains: bool) -> nn.Module:
    """Wraps the module by peft when lora_rank or lora_adapter_path ask for it and the loader has not done so."""
    if adapted_layers(module) or (model_config.lora_rank == 0 and not model_config.lora_adapter_path):
        return module
    from peft import LoraConfig, PeftModel, TaskType, get_peft_model

    if model_config.lora_adapter_path:
        folder = Path(model_config.lora_adapter_path).expanduser()
        rank = get_lora_rank_from_adapter(folder)
        if model_config.lora_rank not in (0, rank):
            raise ValueError(
                f"model.lora_rank={model_config.lora_rank}, but the adapter in model.lora_adapter_path={str(folder)!r} "
                f"has rank {rank}; set actor_rollout_ref.model.lora_rank=0, or {rank}."
            )
        # peft would also read pickled weights
        tensor_shapes(safetensors_of(folder) or [folder / "adapter_model.safetensors"])
        return PeftModel.from_pretrained(module, str(folder), is_trainable=trains)
    targets, excluded = model_config.target_modules, model_config.exclude_modules
    task = None  # with it peft trains a new head completely, in addition to the adapters
    if isinstance(module, PreTrainedModel) and module.can_generate():
        task = TaskType.CAUSAL_LM
    elif type(module).__name__.endswith("ForTokenClassification"):
        task = TaskType.TOKEN_CLS
        if not isinstance(excluded, str):
            excluded = [*(excluded or []), "score", "classifier"]  # peft would adapt this head too
    return get_peft_model(
        module,
        LoraConfig(
            task_type=task,
            r=model_config.lora_rank,
            lora_alpha=model_config.lora_alpha,
            target_modules=targets if isinstance(targets, str) else list(targets),
            exclude_modules=list(excluded) if isinstance(excluded, list | tuple) else excluded,
            bias="none",
        ),
    )


def checkpoint_layers(module: nn.Module, enable: bool) -> None:
    """Let trained transformers models in the module recompute the activations of their layers in the backward pass."""
    for model in outermost_pretrained(module):
        if not model.supports_gradient_checkpointing or not any(p.requires_grad for p in model.parameters()):
            continue
        if enable:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        elif model.is_gradient_checkpointing:
            model.gradient_checkpointing_disable()


def needs_checkpointing(setting: bool | None, hf_config: Any, tokens: int, itemsize: int, free: float) -> bool:
    """What enable_gradient_checkpointing means for a micro-batch: null stands for activations above half of `free`.

    Without checkpointing a layer keeps about 34 values of `itemsize` bytes of each token and hidden unit (Korthikanti
    et al. 2022, arXiv 2205.05198). `free`: bytes that this rank may take.
    """
    text = hf_config.get_text_config()
    kept = VALUES_IN_LAYER * text.num_hidden_layers * text.hidden_size * itemsize
    return tokens * kept > free / 2 if setting is None else setting


def outermost_pretrained(module: nn.Module) -> list[PreTrainedModel]:
    """transformers models that lie inside no other transformers model."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return [m for child in module.children() for m in outermost_pretrained(child)]


def check_same_weights(module: nn.Module) -> None:
    """Refuses ranks that start from different trained weights (a loader that draws without the common seed)."""
    drawn = [p.detach() for p in module.parameters() if p.requires_grad and not is_placeholder(p)]
    checksum = sum(float(p.double().sum()) for p in drawn)
    sums = [0.0] * dist.get_world_size()
    dist.all_gather_object(sums, checksum)
    if len(set(sums)) > 1:
        raise RuntimeError(
            f"the ranks built models with different trained weights (sums {sums}): the model loader must draw new "
            "weights from torch's default generator only, which every rank seeds alike."
        )


def mixed_precision_policy(engine_config: FSDPEngineConfig) -> MixedPrecisionPolicy:
    """Forward and backward in `dtype`, gradients summed over ranks in float32, or as `mixed_precision` says."""
    wanted = {"param_dtype": engine_config.dtype, "reduce_dtype": "float32", **(engine_config.mixed_precision or {})}
    key = "fsdp_config.mixed_precision"
    refuse_unknown(key, wanted, ["param_dtype", "reduce_dtype", "buffer_dtype"])
    compute, reduce = (torch_dtype_of(wanted[name], f"{key}.{name}") for name in ("param_dtype", "reduce_dtype"))
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)


def build_lr_scheduler(optimizer: torch.optim.Optimizer, config: FSDPOptimizerConfig) -> LambdaLR:
    """constant, cosine, linear or wsd after a linear warm-up of lr_warmup_steps (else the ratio of all steps)."""
    total = config.total_training_steps
    warmup = config.lr_warmup_steps
    if warmup is None or warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * total) if total > 0 else 0
    kind = config.lr_scheduler_type
    if kind != "constant" and total <= 0:
        raise ValueError(f"optim.lr_scheduler_type={kind!r} needs optim.total_training_steps, which is {total}.")
    logger.debug("learning rate {}: {}, warm-up {} of {} steps", config.lr, kind, warmup, total)
    curve = {"min_lr_ratio": config.min_lr_ratio or 0.0, "num_cycles": config.num_cycles}
    makers = {
        "constant": lambda: lr_schedules.get_constant_schedule_with_warmup(optimizer, warmup),
        "linear": lambda: transformers.get_linear_schedule_with_warmup(optimizer, warmup, total),  # imports peft
        "cosine": lambda: lr_schedules.get_cosine_schedule_with_warmup(optimizer, warmup, total, **curve),
        "wsd": lambda: lr_schedules.get_wsd_schedule_with_warmup(
            optimizer, warmup, total, **curve, decay=config.lr_wsd_decay_style, decay_steps=config.lr_wsd_decay_steps
        ),
    }
    scheduler = makers[kind]()
    rates = (config.lr * factor(step) for factor in scheduler.lr_lambdas for step in range(total))
    if total > 0 and not any(rates):
        why = "" if config.lr == 0 else f": a warm-up of {warmup} steps starts at 0. Set optim.lr_warmup_steps=0"
        logger.warning("the learning rate is 0 in all {} steps, which train nothing{}", total, why)
    return scheduler
