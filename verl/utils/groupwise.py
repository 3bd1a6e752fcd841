"""Compatibility with verl: statistics over the samples of one prompt."""

import torch

from verl.algos.advantage import as_torch_index  # noqa: F401


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
