"""Compatibility with verl: helpers around Hugging Face models; `verl.models.loading` builds them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from verl.models.loading import *  # noqa: F403
from verl.models.loading import create_huggingface_actor


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


def get_hf_model_path(config) -> str:
    """Directory of the model named by a config with `model.path`."""
    return config.model.path


def _matches_module_list(wanted: str | list[str] | None, key: str) -> bool:
    """peft's rule: a string is a whole-name regular expression, a list holds names or dotted tails."""
    if wanted is None:
        return False
    if isinstance(wanted, str):
        return re.fullmatch(wanted, key) is not None
    return key in wanted or any(key.endswith(f".{name}") for name in wanted)


def check_exclude_modules(config, key: str) -> bool:
    """Whether a peft config excludes the module named `key`."""
    return _matches_module_list(config.exclude_modules, key)


def check_target_modules(config, key: str) -> bool:
    """Whether a peft config adapts the module named `key`."""
    return _matches_module_list(config.target_modules, key)


class LambdaLayer(nn.Module):
    """A function as a module."""

    def __init__(self, fn: Callable):
        super().__init__()
        self.fn = fn

    def forward(self, *args, **kwargs):
        return self.fn(*args, **kwargs)


def squeeze(x: torch.Tensor) -> torch.Tensor:
    """[..., 1] -> [...]."""
    return torch.squeeze(x, dim=-1)


def convert_weight_keys(state_dict: dict[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors, of any shape, by their names in the model's checkpoint files, for models that rename on loading."""
    reverse = {new: old for old, new in (model._checkpoint_conversion_mapping or {}).items()}
    if not reverse:
        return state_dict

    def stored_name(key: str) -> str:
        new = next((n for n in reverse if key.startswith(n)), None)
        return key if new is None else reverse[new].lstrip("^").split("(")[0] + key[len(new) :]

    return {stored_name(key): tensor for key, tensor in state_dict.items()}


@dataclass
class CausalLMOutputForPPO(CausalLMOutputWithPast):
    """A causal model's output that carries log-probs and entropy of the labels, both [B, T]."""

    log_probs: torch.FloatTensor | None = None
    entropy: torch.FloatTensor | None = None


def normalize_model_name(
    name: str, pp_rank: int, vpp_rank: int | None, transformer_config, layer_name: str = "layers"
) -> str:
    """A weight's name with the layer's number in the model in place of that within its pipeline stage.

    The config has num_layers, pipeline_model_parallel_size and virtual_pipeline_model_parallel_size; virtual stages
    alternate between the ranks.
    """
    stages = transformer_config.pipeline_model_parallel_size
    chunks = transformer_config.virtual_pipeline_model_parallel_size or 1
    layers = transformer_config.num_layers // (stages * chunks)  # of one stage
    offset = ((vpp_rank or 0) * stages + pp_rank) * layers
    return re.sub(rf"((?:^|\.){layer_name}\.)(\d+)", lambda m: f"{m[1]}{int(m[2]) + offset}", name, count=1)


def normalize_pp_vpp_params(
    params: Sequence[Sequence[dict[str, Any]]], num_hidden_layers: int, layer_name: str = "layers"
) -> Iterator[tuple[str, Any]]:
    """(name in the model, weight) of every weight in `params[pipeline rank][virtual stage]`."""
    virtual = len(params[0])
    sizes = SimpleNamespace(
        num_layers=num_hidden_layers, pipeline_model_parallel_size=len(params),
        virtual_pipeline_model_parallel_size=virtual,
    )  # fmt: skip
    for chunk in range(virtual):
        for rank, chunks in enumerate(params):
            for name, weight in chunks[chunk].items():
                yield normalize_model_name(name, rank, chunk, sizes, layer_name), weight


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


def pad_packed_inputs(
    unpad_tokens: Tensor, cu_seqlens: Tensor, max_seqlen_in_batch: int, size: int
) -> tuple[Tensor, Tensor, int]:
    """Packed rows [N, ...] with zeros at the end, so that `size` divides N; they belong to the last sequence."""
    missing = -len(unpad_tokens) % size
    if not missing:
        return unpad_tokens, cu_seqlens, max_seqlen_in_batch
    zeros = unpad_tokens.new_zeros(missing, *unpad_tokens.shape[1:])
    borders = cu_seqlens.clone()
    borders[-1] += missing
    last = int(borders[-1] - borders[-2])
    return torch.cat([unpad_tokens, zeros]), borders, max(max_seqlen_in_batch, last)


def extract_multi_modal_inputs(
    batch_data: Sequence[dict[str, Tensor]], indices: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """The inputs of several samples by name, joined in their first dimension; `indices` choose samples."""
    chosen = batch_data if indices is None else [batch_data[n] for n in indices]
    names = dict.fromkeys(name for sample in chosen for name in sample or {})
    return {name: torch.cat([s[name] for s in chosen if s and s.get(name) is not None]) for name in names}


def patch_valuehead_model(model: nn.Module) -> None:
    """Nothing: a value head is part of transformers' models for token classification."""


def get_parallel_model_from_config(*args: Any, **kwargs: Any) -> NoReturn:
    """Refused: this package shards models by FSDP2."""
    how = "a run with actor.strategy=megatron is sharded by FSDP2, and its weights are those of Hugging Face"
    raise NotImplementedError(f"Megatron-LM's models are not built here: {how}.")


get_parallel_gptmodel_from_config = get_parallel_model_from_config
load_megatron_model_weights = load_megatron_gptmodel_weights = get_parallel_model_from_config
load_mcore_dist_weights = get_parallel_model_from_config
