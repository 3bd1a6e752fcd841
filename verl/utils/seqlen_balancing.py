"""Compatibility with verl: import path of `verl.protocol.seqlen_balancing`, and the order of rows before the cut."""

import torch

from verl.protocol.seqlen_balancing import *  # noqa: F403


def get_reverse_idx(idx_map: list[int]) -> list[int]:
    """Inverse of a permutation."""
    return sorted(range(len(idx_map)), key=lambda position: idx_map[position])


def restore_dynamic_batch(data: torch.Tensor, batch_idx_list: list[list[int]]) -> torch.Tensor:
    """Rows that were joined micro-batch after micro-batch, [B, ...], back in the order they had before the cut."""
    order = [i for part in batch_idx_list for i in part]
    if len(order) != data.shape[0]:
        raise ValueError(f"{data.shape[0]} rows cannot be restored by {len(order)} row numbers")
    return data[torch.tensor(get_reverse_idx(order), device=data.device)]
