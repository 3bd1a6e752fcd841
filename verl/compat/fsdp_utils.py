"""Compatibility with verl: helpers for scripts that shard models themselves."""

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    _or_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
)
from transformers import PreTrainedModel

from verl.training.parallel.sharding import (  # noqa: F401
    BUCKET_BYTES,
    activations_on_cpu,
    apply_fsdp2,
    create_device_mesh,
    fill_from_rank_zero,
    full_tensor,
    full_tensors,
    grad_norm,
    is_placeholder,
    is_row_sharded,
    kept_gathered,
    load_fsdp_model_to_gpu,
    load_fsdp_optimizer,
    local_tensor,
    offload_fsdp_model_to_cpu,
    offload_fsdp_optimizer,
    reshard,
    scale_grads,
    shard_units,
    tensor_parallel_mesh,
    tensors_to_fill,
)
from verl.training.peft_weights import adapter_weights, hf_name, peft_models
from verl.utils.accelerator import get_device_id, get_device_name


def fsdp_version(model: nn.Module) -> int:
    """2 for a module of `fully_shard`, 1 for a FullyShardedDataParallel, 0 for any other."""
    if isinstance(model, FSDPModule):
        return 2
    return int(isinstance(model, FullyShardedDataParallel))


def _own_device() -> int | str:
    return get_device_id() if get_device_name() == "cuda" else "cpu"


def init_fn(x: nn.Module) -> nn.Module:
    """Give a module uninitialized memory on this rank's device, on every rank but 0, which holds the weights."""
    if dist.get_rank() != 0:
        x = x.to_empty(device=_own_device(), recurse=False)
    return x


def get_fsdp_wrap_policy(module: nn.Module, config: Any = None, is_lora: bool = False) -> Callable | None:
    """The `auto_wrap_policy` of FullyShardedDataParallel for a module; None where nothing is to be wrapped.

    `config` may hold `disable`, `min_num_params` (wrap by size) or `transformer_layer_cls_to_wrap` (class names, by
    default the model's `_no_split_modules`). With `is_lora`, trained leaves are wrapped on their own. Raises ValueError
    for a class that the module does not have.
    """
    config = {} if config is None else config
    if config.get("disable", False):
        return None
    policies: list[Callable] = []
    if is_lora:
        trained = functools.partial(lambda_auto_wrap_policy, lambda_fn=_is_trained_leaf)
        policies.append(trained)
    if size := config.get("min_num_params", 0):
        policies.append(functools.partial(size_based_auto_wrap_policy, min_num_params=size))
    else:
        wrapped = [m for m in module.modules() if isinstance(m, PreTrainedModel)]
        default = {name for m in wrapped for name in (m._no_split_modules or ())}
        names = config.get("transformer_layer_cls_to_wrap", None)
        names = [names] if isinstance(names, str) else names
        classes = {type(m).__name__: type(m) for m in module.modules()}
        if missing := [name for name in names or () if name not in classes]:
            raise ValueError(f"wrap_policy.transformer_layer_cls_to_wrap={missing}: the model has no such class.")
        if found := {classes[name] for name in names or default if name in classes}:
            policies.append(ModuleWrapPolicy(found))
    return functools.partial(_or_policy, policies=policies) if policies else None


def _is_trained_leaf(module: nn.Module) -> bool:
    return not list(module.named_children()) and getattr(getattr(module, "weight", None), "requires_grad", False)


def fsdp2_load_full_state_dict(
    model: nn.Module, full_state: dict[str, torch.Tensor], device_mesh: DeviceMesh | None = None,
    cpu_offload: Any = None,
) -> None:
    """Fill a module of `fully_shard` from the full weights that rank 0 holds; the other ranks may pass an empty dict.

    With `cpu_offload` the shards go back to the CPU.
    """
    on_device = "cpu" if device_mesh is not None and device_mesh.device_type == "cpu" else _own_device()
    model = model.to(on_device) if dist.get_rank() == 0 else model.to_empty(device=on_device)
    options = StateDictOptions(full_state_dict=True, cpu_offload=bool(cpu_offload), broadcast_from_rank0=True)
    set_model_state_dict(model, full_state, options=options)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    if cpu_offload:
        model.to("cpu", non_blocking=True)


def collect_lora_params(
    module: nn.Module, layered_summon: bool, base_sync_done: bool
) -> OrderedDict[str, torch.Tensor]:
    """Full tensors on the CPU: those of the adapter by their names in peft's files, or, before the base is known to
    the engine, those of the base model by the names of its own files. Every rank calls it.

    `layered_summon` has no effect: tensors are always gathered in buckets.
    """
    if base_sync_done:
        model = next(iter(peft_models(module).values()))
        return OrderedDict(adapter_weights(model, "cpu"))
    base = ((name, p) for name, p in module.named_parameters() if "lora_" not in name)
    return OrderedDict((hf_name(name), full.cpu()) for name, full in full_tensors(base))
