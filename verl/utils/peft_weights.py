"""Streams a sharded model's weights under Hugging Face names, adapters merged in.

peft takes half a second to import: where nothing has needed it so far, no module can be one of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from verl.utils.fsdp_utils import full_tensor

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer


def adapted_layers(module: nn.Module) -> dict[str, BaseTunerLayer]:
    """The layers that carry a peft adapter, by name."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: m for name, m in module.named_modules() if isinstance(m, BaseTunerLayer)}


def peft_models(module: nn.Module) -> dict[str, PeftModel]:
    """peft's wrappers in a module, itself among them, by name."""
    if "peft" not in sys.modules:
        return {}
    from peft import PeftModel

    return {name: m for name, m in module.named_modules() if isinstance(m, PeftModel)}


def without_adapters(module: nn.Module) -> nn.Module:
    """The model inside a peft wrapper, its layers still carrying their adapters; any other module as it is."""
    if "peft" not in sys.modules:
        return module
    from peft import PeftModel

    return module.get_base_model() if isinstance(module, PeftModel) else module


def hf_name(name: str) -> str:
    """A parameter's name without peft's wrappers."""
    return name.replace("base_model.model.", "").replace(".base_layer", "").replace(".original_module", "")


def full_weights(module: nn.Module, device: torch.device | str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, full tensor) of every parameter, W + scaling * B A where a LoRA layer covers W.

    Every rank must walk through all of it: gathering is a collective call.
    """
    layers = adapted_layers(module)
    for name, param in module.named_parameters():
        if ".lora_" in name or ".modules_to_save." in name:
            continue
        if ".original_module." in name:
            trained = _replaced_by(module, name)
            yield hf_name(name), full_tensor(trained, device)
            continue
        weight = full_tensor(param, device)
        owner = name.removesuffix(".base_layer.weight")
        if owner != name and owner in layers:
            weight = _merged(owner, layers[owner], weight, device)
        yield hf_name(name), weight


def _replaced_by(module: nn.Module, name: str) -> nn.Parameter:
    """The trained copy (peft's modules_to_save) of a frozen original parameter."""
    owner, tail = name.split(".original_module.", 1)
    wrapper = module.get_submodule(owner)
    copy = wrapper.modules_to_save[wrapper.active_adapters[0]]
    return copy.get_parameter(tail)


def _merged(name: str, layer: BaseTunerLayer, weight: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    """weight [out, in] plus the layer's active adapters, in the weight's dtype."""
    from peft.tuners.lora import Linear as LoraLinear

    if not isinstance(layer, LoraLinear) or any(layer.use_dora[a] for a in layer.active_adapters if a in layer.lora_A):
        raise TypeError(
            f"{name} carries a {type(layer).__name__} adapter that cannot be merged; only plain LoRA on linear layers "
            "can be passed to a rollout engine. Narrow actor_rollout_ref.model.target_modules."
        )
    merged = weight.float()
    for adapter in layer.active_adapters:
        if adapter not in layer.lora_A:
            continue
        a = full_tensor(layer.lora_A[adapter].weight, device).float()  # [r, in]
        b = full_tensor(layer.lora_B[adapter].weight, device).float()  # [out, r]
        delta = (b @ a) * layer.scaling[adapter]
        merged = merged + (delta.T if layer.fan_in_fan_out else delta)
    return merged.to(weight.dtype)
