"""Compatibility with verl: the patches that verl applies to models, which are not needed here.

Sequence parallelism, rows without padding and log-probs without logits are part of the engine. What would change a
model raises NotImplementedError with the setting that does it here.
"""

from typing import Any, NoReturn

import torch

_ENGINE = "Models are not patched here; build them through verl.training.engine and set"


def apply_monkey_patch(
    model: torch.nn.Module, ulysses_sp_size: int = 1, use_remove_padding: bool = True, use_fused_kernels: bool = False,
    fused_kernels_backend: str | None = None, use_tiled_mlp: bool = False, tiled_mlp_shards: int = 4,
) -> None:
    """Return for a model that needs no patch; NotImplementedError for sequence parallelism, fused or tiled kernels.

    `use_remove_padding` needs none: transformers reads the borders of packed samples from the position ids.
    """
    if ulysses_sp_size > 1:
        raise NotImplementedError(f"ulysses_sp_size={ulysses_sp_size}: {_ENGINE} ulysses_sequence_parallel_size.")
    if use_tiled_mlp:
        raise NotImplementedError(f"use_tiled_mlp=True: {_ENGINE} enable_gradient_checkpointing=true to save memory.")
    patch_forward_with_backends(model, use_fused_kernels, fused_kernels_backend)


def patch_forward_with_backends(
    model: torch.nn.Module, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
) -> None:
    """NotImplementedError with `use_fused_kernels`, else nothing."""
    if use_fused_kernels:
        raise NotImplementedError(f"use_fused_kernels=True: {_ENGINE} model.use_fused_kernels=true.")


def patch_vlm_for_ulysses_input_slicing(model_class: type) -> NoReturn:
    """Always NotImplementedError: multi-modal models are left out."""
    raise NotImplementedError(f"{model_class.__name__}: models of images and text are not supported.")


def _ulysses_flash_attention_forward(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(f"attention over shared sequences: {_ENGINE} ulysses_sequence_parallel_size.")


def repeat_kv(hidden_states: torch.Tensor, n_rep: int) -> torch.Tensor:
    """[B, T, H, D] -> [B, T, H * n_rep, D]: each head n_rep times in a row."""
    return hidden_states.repeat_interleave(n_rep, dim=2)
