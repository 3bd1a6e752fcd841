"""Compatibility with verl: helpers around Hugging Face models; `verl.models.loading` builds them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
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
