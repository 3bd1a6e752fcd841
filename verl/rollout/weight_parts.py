"""Weights on their way from the ranks that train to those that generate, in parts of bytes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from verl.training.parallel.sharding import buckets


@dataclass(frozen=True)
class WeightPart:
    """Consecutive weights: name, dtype and shape of each, and their bytes [N] one after the other."""

    entries: list[tuple[str, torch.dtype, tuple[int, ...]]]
    data: np.ndarray


def pack_parts(weights: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[WeightPart]:
    """Parts of at most `limit` bytes, or of one tensor. Tensors are copied to the CPU."""
    copies = ((name, tensor.detach().cpu().contiguous().clone()) for name, tensor in weights)
    for part in buckets(copies, limit):
        flat = [tensor.reshape(-1).view(torch.uint8).numpy() for _, tensor in part]
        entries = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in part]
        yield WeightPart(entries, np.concatenate(flat))


def read_part(part: WeightPart) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a part, copied."""
    start = 0
    for name, dtype, shape in part.entries:
        size = torch.Size(shape).numel() * dtype.itemsize
        yield name, torch.from_numpy(part.data[start : start + size].copy()).view(dtype).view(shape)
        start += size
