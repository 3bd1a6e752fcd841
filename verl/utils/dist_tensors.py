"""Collectives over dicts of tensors, and statistics over all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict


def broadcast_dict_tensor(tensors: dict[str, torch.Tensor] | TensorDict, src: int, group: Any) -> None:
    """Overwrite every tensor, in place, with rank `src`'s; keys and shapes agree on all ranks."""
    for key in sorted(tensors.keys()):
        dist.broadcast(tensors[key], src=src, group=group)


def allgather_dict_tensors(
    tensors: dict[str, torch.Tensor] | TensorDict, size: int, group: Any, dim: int = 0
) -> dict[str, torch.Tensor] | TensorDict:
    """Every tensor joined along `dim` over the ranks of `group` in rank order; shapes agree on all ranks."""
    gathered = {}
    for key in sorted(tensors.keys()):
        value = tensors[key].contiguous()
        parts = [torch.empty_like(value) for _ in range(size)]
        dist.all_gather(parts, value, group=group)
        gathered[key] = torch.cat(parts, dim=dim)
    if isinstance(tensors, TensorDict):
        return TensorDict(gathered, batch_size=[tensors.batch_size[0] * size], device=tensors.device)
    return gathered


def allgather_dict_into_dict(data: dict, group: Any = None) -> dict[str, list]:
    """{key: value} on every rank -> {key: [value of rank 0, value of rank 1, ...]} on all of them."""
    parts: list[dict] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(parts, data, group=group)
    return {key: [part[key] for part in parts] for key in data}


def distributed_mean_max_min_std(
    local_tensor: torch.Tensor, compute_max: bool = True, compute_min: bool = True, compute_std: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Mean, max, min and unbiased deviation of all ranks' entries (any shape, not empty on any rank)."""
    local = local_tensor.detach().float()
    total = torch.stack([local.sum(), torch.tensor(float(local.numel()), device=local.device)])
    dist.all_reduce(total)
    mean, count = total[0] / total[1], total[1]

    def reduced(value: torch.Tensor, op: Any) -> torch.Tensor:
        dist.all_reduce(value, op=op)
        return value

    largest = reduced(local.max().clone(), dist.ReduceOp.MAX) if compute_max else None
    least = reduced(local.min().clone(), dist.ReduceOp.MIN) if compute_min else None
    std = None
    if compute_std:
        std = (reduced(((local - mean) ** 2).sum(), dist.ReduceOp.SUM) / (count - 1).clamp(min=1)).sqrt()
    return mean, largest, least, std


def distributed_masked_mean(local_tensor: torch.Tensor, local_mask: torch.Tensor) -> torch.Tensor:
    """Mean over all ranks of the entries whose mask is 1; tensor and mask of one shape."""
    mask = local_mask.to(local_tensor.dtype)
    total = torch.stack([torch.where(mask.bool(), local_tensor, 0.0).mul(mask).sum(), mask.sum()]).detach()
    dist.all_reduce(total)
    return total[0] / total[1].clamp(min=1e-8)
