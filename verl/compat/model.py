"""Compatibility with verl: helpers around Hugging Face models; `verl.models.loading` builds them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, PretrainedConfig, PreTrainedModel

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


def convert_weight_keys(state_dict: dict[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors, of any shape, by their names in the model's checkpoint files, for models that rename on loading."""
    reverse = {new: old for old, new in (model._checkpoint_conversion_mapping or {}).items()}
    if not reverse:
        return state_dict

    def stored_name(key: str) -> str:
        new = next((n for n in reverse if key.startswith(n)), None)
        return key if new is None else reverse[new].lstrip("^").split("(")[0] + key[len(new) :]

    return {stored_name(key): tensor for key, tensor in state_dict.items()}


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
