"""Compatibility with verl: helpers of scripts that build, patch or shard Hugging Face models themselves."""

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from transformers import AutoModelForTokenClassification, PretrainedConfig, PreTrainedModel

from verl.models.loading import create_huggingface_actor
from verl.training.parallel.sharding import full_tensors, shard_units
from verl.training.peft_weights import adapter_weights, hf_name, peft_models, stored_names
from verl.utils.accelerator import get_device_name


def create_huggingface_critic(
    model_name: str, override_config_kwargs: dict | None = None, automodel_kwargs: dict | None = None
) -> nn.Module:
    """Loads `model_name` with one value per token; logits are [B, T, 1]."""
    return create_huggingface_actor(model_name, override_config_kwargs, automodel_kwargs, loader="value_head")


def load_valuehead_model(
    local_path: str, torch_dtype: torch.dtype, model_config: PretrainedConfig, trust_remote_code: bool
) -> nn.Module:
    """Token classification model with one label, built with the given config; logits are [B, T, 1]."""
    model_config.num_labels = 1
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )


def convert_weight_keys(state_dict: dict[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors, of any shape, by their names in the model's checkpoint files, for models that rename on loading."""
    return dict(stored_names(model, state_dict.items()))


def create_random_mask(
    input_ids: Tensor, max_ratio_of_valid_token: float, max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> Tensor:
    """int64 [B, T]: in each row of input_ids [B, T], zeros, a run of ones of random length, and zeros."""
    rows, length = input_ids.shape
    if not 0 <= min_ratio_of_valid_token <= max_ratio_of_valid_token <= 1 - max_ratio_of_left_padding:
        raise ValueError("min_ratio_of_valid_token <= max_ratio_of_valid_token <= 1 - max_ratio_of_left_padding")
    least, most = int(length * min_ratio_of_valid_token), int(length * max_ratio_of_valid_token)
    begin = torch.randint(0, int(length * max_ratio_of_left_padding) + 1, (rows, 1))
    end = begin + torch.randint(least, most + 1, (rows, 1))
    position = torch.arange(length)
    return ((position >= begin) & (position < end)).long().to(input_ids.device)


def apply_monkey_patch(
    model: torch.nn.Module, ulysses_sp_size: int = 1, use_remove_padding: bool = True, use_fused_kernels: bool = False,
    fused_kernels_backend: str | None = None, use_tiled_mlp: bool = False, tiled_mlp_shards: int = 4,
) -> None:
    """Return for a model that needs no patch; NotImplementedError for sequence parallelism, fused or tiled kernels."""
    needed = {
        " and set ulysses_sequence_parallel_size": ulysses_sp_size > 1, ", which holds no logits": use_fused_kernels,
        " and set enable_gradient_checkpointing=true to save memory": use_tiled_mlp,
    }  # fmt: skip
    for how, is_needed in needed.items():
        if is_needed:
            raise NotImplementedError(f"models are not patched; build them by verl.training.engine{how}")


def patch_forward_with_backends(
    model: torch.nn.Module, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
) -> None:
    """NotImplementedError with `use_fused_kernels`, else nothing."""
    apply_monkey_patch(model, use_fused_kernels=use_fused_kernels)


def patch_vlm_for_ulysses_input_slicing(model_class: type) -> NoReturn:
    """Always NotImplementedError: multi-modal models are left out."""
    raise NotImplementedError(f"{model_class.__name__}: models of images and text are not supported.")


def repeat_kv(hidden_states: torch.Tensor, n_rep: int) -> torch.Tensor:
    """[B, T, H, D] -> [B, T, H * n_rep, D]: each head n_rep times in a row."""
    return hidden_states.repeat_interleave(n_rep, dim=2)


def fsdp_version(model: nn.Module) -> int:
    """2 for a module of `fully_shard`, 1 for a FullyShardedDataParallel, 0 for any other."""
    return 2 if isinstance(model, FSDPModule) else int(isinstance(model, FullyShardedDataParallel))


def init_fn(x: nn.Module) -> nn.Module:
    """Give a module uninitialized memory on this rank's device, on every rank but 0, which holds the weights."""
    return x if dist.get_rank() == 0 else x.to_empty(device=get_device_name(), recurse=False)


def get_fsdp_wrap_policy(module: nn.Module, config: Any = None, is_lora: bool = False) -> Callable | None:
    """The `auto_wrap_policy` of FSDP1 for the `shard_units` of a `wrap_policy`; with `is_lora` trained leaves, too."""
    config = dict(config or {})
    units = set(shard_units(module, config))
    if is_lora and not config.get("disable"):
        trained = (m for m in module.modules() if getattr(getattr(m, "weight", None), "requires_grad", False))
        units.update(m for m in trained if not list(m.children()))
    return functools.partial(lambda_auto_wrap_policy, lambda_fn=units.__contains__) if units else None


def fsdp2_load_full_state_dict(
    model: nn.Module, full_state: dict[str, torch.Tensor], device_mesh: DeviceMesh | None = None,
    cpu_offload: Any = None,
) -> None:
    """Fill a module of `fully_shard` from the full weights of rank 0; the shards go to the CPU with `cpu_offload`."""
    on_device = "cpu" if device_mesh is not None and device_mesh.device_type == "cpu" else get_device_name()
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
    """Full tensors, on the CPU and by their names in files: of the adapter, or else of the base model."""
    if base_sync_done:
        return OrderedDict(adapter_weights(next(iter(peft_models(module).values())), "cpu"))
    base = ((name, p) for name, p in module.named_parameters() if "lora_" not in name)
    return OrderedDict((hf_name(name), full.cpu()) for name, full in full_tensors(base))
