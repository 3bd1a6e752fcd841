"""Loads Hugging Face models by a loader's name, with helpers for their configs, dtypes and sizes."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from loguru import logger
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from verl.utils.problems import one_line
from verl.utils.registry import Registry
from verl.utils.weight_files import untie_by_weights

if TYPE_CHECKING:
    from verl.config.model import HFModelConfig
    from verl.models.stored_weights import StoredWeights

ModelLoader = Callable[..., nn.Module]

_LOADERS: Registry[str, ModelLoader] = Registry(
    "actor_rollout_ref.model.loader.name",
    "Your own: register it in a module named by actor_rollout_ref.model.external_lib.",
)


def register_model_loader(name: str) -> Callable[[ModelLoader], ModelLoader]:
    """Decorator: registers `load(model_config, torch_dtype, **kwargs) -> nn.Module` under `name`."""
    return _LOADERS.register(name)


def get_model_loader(name: str) -> ModelLoader:
    """The loader registered under `name`; an unknown name is refused with the nearest known one."""
    return _LOADERS.find(name)


TORCH_DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "float": torch.float32,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp16": torch.float16, "float16": torch.float16, "half": torch.float16,
}  # fmt: skip


def torch_dtype_of(name: str, key: str) -> torch.dtype:
    """The torch dtype of a config value; `key` names the config key in the error."""
    if name not in TORCH_DTYPES:
        raise ValueError(f"{key}={name!r} is not a dtype. Known: {', '.join(TORCH_DTYPES)}.")
    return TORCH_DTYPES[name]


def _model_dir(model_config: HFModelConfig) -> str:
    return model_config.local_path or model_config.path


# Built-in loaders: name -> (auto class or None for the one that fits the config, values that win over override_config)
_BUILT_IN: dict[str, tuple[type | None, dict[str, Any]]] = {
    "auto": (None, {}),
    # Without dropout a critic's value is the same in every forward.
    "value_head": (AutoModelForTokenClassification, {"num_labels": 1, "classifier_dropout": 0.0}),
}


def _class_and_config(loader: str, model_config: HFModelConfig) -> tuple[type, PretrainedConfig, dict[str, Any]]:
    """(auto class, config to build from, further arguments of from_pretrained) of a built-in loader."""
    auto_class, fixed_values = _BUILT_IN[loader]
    directory, overrides = _model_dir(model_config), model_config.override_config
    # Read from the files, not model_config.hf_config: other code may hold and change that object.
    hf_config = get_huggingface_actor_config(
        model_config.local_hf_config_path or directory, {**overrides, **fixed_values}, model_config.trust_remote_code
    )
    untie_by_weights(hf_config, directory)
    # from_pretrained takes this config value as an argument, too.
    arguments = {name: value for name, value in overrides.items() if name == "attn_implementation"}
    return auto_class or get_hf_auto_model_class(hf_config), hf_config, arguments


def load_without_weights(
    model_config: HFModelConfig, torch_dtype: torch.dtype
) -> tuple[PreTrainedModel, StoredWeights] | None:
    """(module, stored weights): what model.loader makes, with placeholders that the stored weights are to replace.

    Parameters that are not stored are drawn as in a full load. None where only the loader itself can make the model:
    loaders of the user's own, loader.kwargs, models with their own code, folders that `StoredWeights.create` refuses.
    """
    from verl.models.stored_weights import StoredWeights

    name, directory = model_config.loader.name, _model_dir(model_config)
    if name not in _BUILT_IN or model_config.loader.kwargs or not os.path.isdir(directory):
        return None
    auto_class, hf_config, arguments = _class_and_config(name, model_config)
    if "auto_map" in hf_config.to_dict():
        return None
    with torch.device("meta"):
        meta = auto_class.from_config(hf_config, dtype=torch_dtype)
    stored = StoredWeights.create(meta, directory)
    if stored is None:
        return None
    module = type(meta).from_pretrained(
        None, config=hf_config, state_dict=stored.placeholders(torch_dtype), dtype=torch_dtype, **arguments
    )
    module.name_or_path = module.config.name_or_path = directory
    if module.can_generate():
        module.generation_config = get_generation_config(directory) or module.generation_config
    return module, stored


def _load_built_in(loader: str, model_config: HFModelConfig, torch_dtype: torch.dtype, **kwargs) -> nn.Module:
    directory, trust = _model_dir(model_config), model_config.trust_remote_code
    auto_class, hf_config, arguments = _class_and_config(loader, model_config)
    try:
        return auto_class.from_pretrained(
            directory, config=hf_config, dtype=torch_dtype, trust_remote_code=trust, **{**arguments, **kwargs}
        )
    except (pickle.UnpicklingError, SafetensorError, EOFError) as error:
        raise ValueError(f"{directory} holds a file that is not loaded: {one_line(error)}") from error


@register_model_loader("auto")
def load_causal_lm(model_config: HFModelConfig, torch_dtype: torch.dtype, **kwargs) -> nn.Module:
    """AutoModelForCausalLM (or the class its config names) with weights, on the CPU."""
    return _load_built_in("auto", model_config, torch_dtype, **kwargs)


@register_model_loader("value_head")
def load_token_regression(model_config: HFModelConfig, torch_dtype: torch.dtype, **kwargs) -> nn.Module:
    """AutoModelForTokenClassification with one label per token: a critic or a reward model. Logits are [B, T, 1]."""
    return _load_built_in("value_head", model_config, torch_dtype, **kwargs)


def create_huggingface_actor(
    model_name: str, override_config_kwargs: dict | None = None, automodel_kwargs: dict | None = None,
    loader: str = "auto",
) -> nn.Module:  # fmt: skip
    """Loads the model in directory `model_name` with the loader of that name.

    `automodel_kwargs` may hold `dtype` or `torch_dtype`, and `trust_remote_code`; the rest goes to `from_pretrained`.
    """
    options = dict(automodel_kwargs or {})
    torch_dtype, dtype = options.pop("torch_dtype", None), options.pop("dtype", None)
    model_config = SimpleNamespace(  # with what loaders read of HFModelConfig
        path=model_name, local_path=model_name, local_hf_config_path=None, hf_config=None,
        override_config=dict(override_config_kwargs or {}),
        trust_remote_code=bool(options.pop("trust_remote_code", False)),
    )  # fmt: skip
    return get_model_loader(loader)(model_config, torch_dtype or dtype or torch.float32, **options)


def update_model_config(module_config: PretrainedConfig, override_config_kwargs: dict) -> None:
    """Sets each key on the config, in place; a nested mapping goes into the sub-config or object of that name."""
    for key, value in override_config_kwargs.items():
        below = getattr(module_config, key, None)
        if isinstance(value, Mapping) and hasattr(below, "__dict__") and not isinstance(below, Mapping):
            update_model_config(below, value)
        else:
            setattr(module_config, key, value)


def get_huggingface_actor_config(
    model_name: str, override_config_kwargs: dict | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """The directory's config with the overrides applied."""
    config = AutoConfig.from_pretrained(model_name, trust_remote_code=trust_remote_code)
    update_model_config(config, dict(override_config_kwargs or {}))
    return config


def get_generation_config(model: str, trust_remote_code: bool = False) -> GenerationConfig | None:
    """The model's generation_config.json, else one derived from its config; None where there is neither."""
    with suppress(OSError):
        return GenerationConfig.from_pretrained(model)
    with suppress(OSError):
        return GenerationConfig.from_model_config(get_huggingface_actor_config(model, None, trust_remote_code))
    return None


def get_hf_auto_model_class(hf_config: PretrainedConfig) -> type:
    """The transformers auto class that builds a text generator from this config."""
    for auto_class in (AutoModelForCausalLM, AutoModelForSeq2SeqLM):
        if type(hf_config) in auto_class._model_mapping:
            return auto_class
    auto_map = hf_config.to_dict().get("auto_map") or {}
    for auto_class in (AutoModelForCausalLM, AutoModelForTokenClassification):
        if auto_class.__name__ in auto_map:
            return auto_class
    raise ValueError(
        f"model_type {hf_config.model_type!r} is not a causal language model that transformers knows. "
        "Name another model, or in RL a loader for it in actor_rollout_ref.model.loader.name."
    )


def get_lora_rank_from_adapter(adapter_path: str | os.PathLike) -> int:
    """The rank `r` in a peft adapter's adapter_config.json."""
    file = Path(adapter_path).expanduser() / "adapter_config.json"
    if not file.is_file():
        raise FileNotFoundError(f"actor_rollout_ref.model.lora_adapter_path must name an adapter's folder; no {file}")
    try:
        described = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error}). Copy the adapter again.") from error
    if not isinstance(described, dict) or not isinstance(described.get("r"), int):
        raise ValueError(f"{file} has no rank 'r', so it is not a LoRA adapter. Name another folder.")
    return described["r"]


def compute_position_id_with_mask(mask: torch.Tensor) -> torch.Tensor:
    """Positions 0, 1, 2... of the attended tokens; padding in front gets 0. [B, T] -> [B, T] int64; 1 = attended."""
    return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def get_model_size(model: nn.Module, scale: str = "auto") -> tuple[float, str]:
    """(number of parameters in units of `scale`, the unit): "B", "M", "K", "" (ones); "auto": the largest that fits."""
    count = sum(p.numel() for p in model.parameters())
    units = {"B": 1e9, "M": 1e6, "K": 1e3, "": 1.0}
    if scale == "auto":
        scale = next(unit for unit, value in units.items() if count >= value or unit == "")
    if scale not in units:
        raise ValueError(f"scale={scale!r} is unknown. Known: auto, {', '.join(repr(u) for u in units)}.")
    return count / units[scale], scale


def print_model_size(model: nn.Module, name: str | None = None) -> None:
    """Logs the number of parameters, and how many of them are trained."""
    count, unit = get_model_size(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    logger.info("{} has {:.3f}{} parameters, {} trained", name or type(model).__name__, count, unit, trained)
