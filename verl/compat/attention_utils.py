"""Compatibility with verl: rows without padding and back, which verl takes from flash-attn."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["index_first_axis", "pad_input", "rearrange", "unpad_input"]


def unpad_input(hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Rows of the counted positions, in order: [B, T, ...], mask [B, T] -> [N, ...].

    Also their positions in [B * T] ([N] int64), the cumulated lengths ([B + 1] int32), the largest length, and the
    lengths [B] int32.
    """
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    borders = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, borders, int(lengths.max()), lengths


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: [N, ...] -> [batch, seqlen, ...], zeros elsewhere."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    padded = padded.index_copy(0, indices, hidden_states)
    return padded.unflatten(0, (batch, seqlen))


def index_first_axis(hidden_states: Tensor, indices: Tensor) -> Tensor:
    """Rows of a tensor by number."""
    return hidden_states[indices]


def rearrange(*args: Any, **kwargs: Any) -> Tensor:
    """einops.rearrange."""
    import einops

    return einops.rearrange(*args, **kwargs)
