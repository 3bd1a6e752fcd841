"""Streams a sharded model's weights under Hugging Face names, adapters merged in.

peft takes half a second to import: where nothing has needed it so far, no module can be one of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, rename_source_key

from verl.models.stored_weights import hf_name
from verl.training.parallel.sharding import full_tensor, full_tensors, is_row_sharded, local_tensor

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer


def adapted_layers(module: nn.Module) -> dict[str, BaseTunerLayer]:
    """The layers that carry a peft adapter, by name."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return {name: m for name, m in module.named_modules() if tuners and isinstance(m, tuners.BaseTunerLayer)}


def peft_models(module: nn.Module) -> dict[str, PeftModel]:
    """peft's wrappers in a module, itself among them, by name."""
    peft = sys.modules.get("peft")
    return {name: m for name, m in module.named_modules() if peft and isinstance(m, peft.PeftModel)}


def without_adapters(module: nn.Module) -> nn.Module:
    """The model inside a peft wrapper, its layers still carrying their adapters; any other module as it is."""
    peft = sys.modules.get("peft")
    return module.get_base_model() if peft and isinstance(module, peft.PeftModel) else module


def full_weights(
    module: nn.Module, device: torch.device | str | None = None, dtype: torch.dtype | None = None, **buckets: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the model's own files, full tensor in `dtype`) of every parameter, W + scaling * B A under LoRA.

    Shards are merged in float32 and rounded once, to `dtype`, before they are gathered; None keeps their dtype.
    `buckets`: options of `full_tensors`. Every rank must walk through all of it: gathering is a collective call.
    """
    return _names_of_files(module, full_tensors(_merged_shards(module, device, dtype), **buckets))


def described_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors of the meta device with the names, shapes and dtypes of `full_weights`, in its order; gathers nothing."""
    weights = _weights(module)
    described = ((hf_name(n), torch.empty(w.shape, dtype=w.dtype, device="meta")) for n, w in weights)
    return dict(_names_of_files(module, described))


def adapter_weights(model: PeftModel, device: torch.device | str, **buckets: Any) -> dict[str, torch.Tensor]:
    """Full tensors of what the adapter trains, by their names in peft's files. `buckets`, ranks: as in
    `full_weights`."""
    from peft import get_peft_model_state_dict

    shards = ((name, p.detach().to(device)) for name, p in model.named_parameters() if p.requires_grad)
    return get_peft_model_state_dict(model, dict(full_tensors(shards, **buckets)), save_embedding_layers=False)


def _names_of_files(
    module: nn.Module, weights: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    model = without_adapters(module)
    return stored_names(model, weights) if isinstance(model, PreTrainedModel) else weights


def _weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, this rank's shard) of every parameter without the adapters; of a copied module the trained copy."""
    for name, param in module.named_parameters():
        if ".lora_" in name or ".modules_to_save." in name:
            continue
        if ".original_module." in name:  # frozen
            owner, tail = name.split(".original_module.", 1)
            wrapper = module.get_submodule(owner)
            param = wrapper.modules_to_save[wrapper.active_adapters[0]].get_parameter(tail)
        yield name, param.detach()


def _merged_shards(
    module: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, this rank's shard) of every parameter, adapters merged in."""
    layers = adapted_layers(module)
    for name, weight in _weights(module):
        if device is not None:
            weight = weight.to(device)
        owner = name.removesuffix(".base_layer.weight")
        if owner != name and owner in layers:
            weight = _merged(owner, layers[owner], weight, device, dtype or weight.dtype)
        yield hf_name(name), weight if dtype is None else weight.to(dtype)


def stored_names(
    model: PreTrainedModel, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights under the names of the model's files, where every expert has tensors of its own.

    transformers joins the experts' tensors of a layer when it loads a model; rollout engines know the files' names.
    """
    mapping = [entry for entry in get_model_conversion_mapping(model, add_legacy=False)[::-1]
               if not isinstance(entry, PrefixChange)]  # fmt: skip
    back = [entry.reverse_transform() for entry in mapping]
    renamings = [entry for entry in back if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in back if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for name, tensor in weights:
        stored, pattern = rename_source_key(name, renamings, converters, reverse=True)
        if pattern is None:
            yield stored, tensor
        else:
            converter = deepcopy(by_pattern[pattern])
            converter.add_tensor(stored, name, pattern, tensor)
            for part, value in converter.convert(stored, model=model, config=model.config).items():
                yield part, value[0] if isinstance(value, list) else value
        tensor = converter = value = None  # before the next one is gathered


def _merged(
    name: str, layer: BaseTunerLayer, weight: torch.Tensor, device: torch.device | str | None, dtype: torch.dtype
) -> torch.Tensor:
    """weight [out, in] plus the layer's active adapters, in `dtype`; sharded as the weight, or full."""
    from peft.tuners.lora import Linear as LoraLinear

    if not isinstance(layer, LoraLinear) or any(layer.use_dora[a] for a in layer.active_adapters if a in layer.lora_A):
        raise TypeError(
            f"{name} has an adapter that cannot be merged: only LoRA (not DoRA) of linear layers can. Leave it out "
            "of actor_rollout_ref.model.target_modules (SFT: model.target_modules), or set another lora_adapter_path."
        )
    by_rows = is_row_sharded(weight) and not layer.fan_in_fan_out  # then B has the same rows on this rank
    base = weight if by_rows else full_tensor(weight)
    merged = local_tensor(base).float()
    for adapter in layer.active_adapters:
        if adapter not in layer.lora_A:
            continue
        a = full_tensor(layer.lora_A[adapter].weight, device).float()  # [r, in]
        b = layer.lora_B[adapter].weight.detach()  # [out, r]
        b = local_tensor(b.to(merged.device) if by_rows else full_tensor(b, device)).float()
        delta = (b @ a) * layer.scaling[adapter]
        merged = merged + (delta.T if layer.fan_in_fan_out else delta)
    merged = merged.to(dtype)
    if not by_rows:
        return merged
    return DTensor.from_local(
        merged, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
