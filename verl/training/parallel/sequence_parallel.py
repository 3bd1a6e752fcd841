"""Sequence parallelism by exchanging heads for positions (DeepSpeed Ulysses, arXiv 2309.14509).

Outside of attention each rank of the group holds a part of the sequence, [B, T / n, H, D]; for attention an all-to-all
gives it the full sequence of a part of the heads, [B, T, H / n, D]. Without a group, or in a group of one rank, every
function returns its input unchanged.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

_ULYSSES_SEQUENCE_PARALLEL_GROUP: ProcessGroup | None = None


def set_ulysses_sequence_parallel_group(group: ProcessGroup | None) -> None:
    """Make `group` the default of all functions here."""
    global _ULYSSES_SEQUENCE_PARALLEL_GROUP
    _ULYSSES_SEQUENCE_PARALLEL_GROUP = group


def get_ulysses_sequence_parallel_group() -> ProcessGroup | None:
    """The default group; None if there is none."""
    return _ULYSSES_SEQUENCE_PARALLEL_GROUP


def get_ulysses_sequence_parallel_world_size(group: ProcessGroup | None = None) -> int:
    """Number of ranks that share a sequence."""
    group = group or _ULYSSES_SEQUENCE_PARALLEL_GROUP
    return dist.get_world_size(group) if group is not None else 1


def all_to_all_tensor(
    local_input: Tensor, scatter_dim: int, gather_dim: int, group: ProcessGroup | None = None, async_op: bool = False
) -> Tensor | Callable[[], Tensor]:
    """Split `scatter_dim` among the ranks and concatenate what they send along `gather_dim`; not differentiable.

    For example [B, T / n, H, D] -> [B, T, H / n, D] with scatter_dim=2, gather_dim=1 on n ranks.

    With `async_op` a function is returned that waits and gives the result. Raises ValueError if the ranks cannot share
    `scatter_dim` evenly.
    """
    group = group or _ULYSSES_SEQUENCE_PARALLEL_GROUP
    size = get_ulysses_sequence_parallel_world_size(group)
    if size == 1:
        return (lambda: local_input) if async_op else local_input
    check_even(local_input, scatter_dim, size)
    sent = [part.contiguous() for part in local_input.chunk(size, scatter_dim)]
    received = [torch.empty_like(part) for part in sent]
    work = dist.all_to_all(received, sent, group=group, async_op=async_op)

    def concatenated() -> Tensor:
        if async_op:
            work.wait()
        return torch.cat(received, gather_dim)

    return concatenated if async_op else concatenated()


class SeqAllToAll(torch.autograd.Function):
    """`all_to_all_tensor`, same shapes, with the reverse exchange as its backward; `async_op` is ignored."""

    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup | None, local_input: Tensor, scatter_dim: int, gather_dim: int,
        async_op: bool = False,
    ) -> Tensor:
        ctx.group = group or _ULYSSES_SEQUENCE_PARALLEL_GROUP
        ctx.scatter_dim, ctx.gather_dim = scatter_dim, gather_dim
        return all_to_all_tensor(local_input, scatter_dim, gather_dim, ctx.group)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple:
        back = all_to_all_tensor(grad_output[0], ctx.gather_dim, ctx.scatter_dim, ctx.group)
        return None, back, None, None, None


def gather_seq_scatter_heads(
    x: Tensor, seq_dim: int, head_dim: int, unpadded_dim_size: int = 0, group: ProcessGroup | None = None
) -> Tensor:
    """A part of the sequence with all heads, [B, T / n, H, D] -> the full one with a part of them, [B, T, H / n, D].

    `unpadded_dim_size` is the sequence's length without padding, which is cut off; 0 keeps all positions.
    """
    if get_ulysses_sequence_parallel_world_size(group) == 1:
        return x
    x = SeqAllToAll.apply(group, x, head_dim, seq_dim)
    return x.narrow(seq_dim, 0, unpadded_dim_size) if 0 < unpadded_dim_size < x.shape[seq_dim] else x


def gather_heads_scatter_seq(x: Tensor, head_dim: int, seq_dim: int, group: ProcessGroup | None = None) -> Tensor:
    """[B, T, H / n, D] -> [B, T / n, H, D], after T is padded to a multiple of the n ranks: inverse of the above."""
    size = get_ulysses_sequence_parallel_world_size(group)
    if size == 1:
        return x
    return SeqAllToAll.apply(group, pad_dim(x, seq_dim, -x.shape[seq_dim] % size), seq_dim, head_dim)


def validate_ulysses_config(num_heads: int, ulysses_sequence_size: int) -> None:
    """Raise AssertionError if the ranks cannot share the attention heads evenly."""
    if ulysses_sequence_size > 1 and num_heads % ulysses_sequence_size:
        raise AssertionError(
            f"ulysses_sequence_parallel_size={ulysses_sequence_size} does not divide the model's {num_heads} attention "
            "heads; use a divisor."
        )


def check_even(x: Tensor, dim: int, size: int) -> None:
    """ValueError unless `size` divides dimension `dim`."""
    if x.shape[dim] % size:
        raise ValueError(f"{size} ranks cannot share dimension {dim} of {tuple(x.shape)} evenly.")


def pad_dim(x: Tensor, dim: int, pads: int) -> Tensor:
    """`x` with `pads` zeros at the end of dimension `dim`."""
    dim %= x.ndim
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, pads]) if pads else x
