"""Statistics over the samples of one prompt."""

from typing import Any

import numpy as np
import torch


def as_torch_index(index: Any, device: torch.device | str | None = None) -> torch.Tensor:
    """Group labels [N] of any type -> int64 [N]: numbers 0..G-1 in order of first appearance."""
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu().numpy()
    labels = np.asarray(index)
    if labels.ndim != 1:
        raise ValueError(f"group labels have shape {labels.shape}; expected one label per sample, shape [N]")
    seen: dict[Any, int] = {}
    numbers = [seen.setdefault(label, len(seen)) for label in labels.tolist()]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def group_mean_std(
    scores: torch.Tensor, gidx: torch.Tensor, eps: float = 1e-6, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, standard deviation and size of each group: scores [N], gidx [N] in 0..G-1 -> three of [G].

    The deviation is the unbiased one, at least `eps`. A group of one has mean 0 and deviation 1, which leaves its
    score unchanged.
    """
    if scores.shape != gidx.shape or scores.ndim != 1:
        raise ValueError(f"scores {tuple(scores.shape)} and gidx {tuple(gidx.shape)} must be of one shape [N]")
    target = scores.device if device is None else torch.device(device)
    values = scores.to(target, torch.float32)
    gidx = gidx.to(target, torch.int64)
    groups = int(gidx.max()) + 1 if gidx.numel() else 0
    zeros = torch.zeros(groups, device=target)
    count = zeros.index_add(0, gidx, torch.ones_like(values))
    mean = zeros.index_add(0, gidx, values) / count.clamp(min=1)
    squares = zeros.index_add(0, gidx, (values - mean[gidx]) ** 2)
    std = (squares / (count - 1).clamp(min=1)).sqrt().clamp(min=eps)
    alone = count <= 1
    return mean.masked_fill(alone, 0.0), std.masked_fill(alone, 1.0), count


def groups_of(group_index: torch.Tensor) -> list[list[int]]:
    """Row numbers of each run of equal labels in group_index [B], in order."""
    _, counts = torch.unique_consecutive(group_index, return_counts=True)
    ends = counts.cumsum(0).tolist()
    return [list(range(end - count, end)) for end, count in zip(ends, counts.tolist(), strict=True)]
