"""Sequence parallelism by exchanging heads for positions (DeepSpeed Ulysses, arXiv 2309.14509).

Outside of attention each rank of the group holds a part of the sequence, [B, T / n, H, D]; for attention an all-to-all
gives it the full sequence of a part of the heads, [B, T, H / n, D]. Without a group, or in a group of one rank, every
function returns its input unchanged.
"""

from collections.abc import Callable
from functools import partial
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


def get_ulysses_sequence_parallel_rank(group: ProcessGroup | None = None) -> int:
    """This process's rank among them."""
    group = group or _ULYSSES_SEQUENCE_PARALLEL_GROUP
    return dist.get_rank(group) if group is not None else 0


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
    _refuse_uneven(local_input, scatter_dim, size)
    sent = [part.contiguous() for part in local_input.chunk(size, scatter_dim)]
    received = [torch.empty_like(part) for part in sent]
    work = dist.all_to_all(received, sent, group=group, async_op=async_op)
    return partial(_concatenated, received, gather_dim, work) if async_op else torch.cat(received, gather_dim)


def all_gather_tensor(
    local_tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Tensor | Callable[[], Tensor]:
    """The tensors of all ranks, of one shape, along the first dimension, in rank order; not differentiable.

    With `async_op` a function is returned that waits and gives the result.
    """
    group = group or _ULYSSES_SEQUENCE_PARALLEL_GROUP
    size = get_ulysses_sequence_parallel_world_size(group)
    if size == 1:
        return (lambda: local_tensor) if async_op else local_tensor
    sent = local_tensor.contiguous()
    received = [torch.empty_like(sent) for _ in range(size)]
    work = dist.all_gather(received, sent, group=group, async_op=async_op)
    return partial(_concatenated, received, 0, work) if async_op else torch.cat(received)


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


class Gather(torch.autograd.Function):
    """All parts along `gather_dim`, [B, T / n, ...] -> [B, T, ...] for dimension 1 on n ranks; the backward takes this
    rank's part of the gradient.

    `grad_scaler` multiplies it by the number of ranks: the loss is then a mean over them, each of which computes the
    loss of the full sequence. Parts may differ in size along `gather_dim` only. `async_op` changes nothing: autograd
    waits.
    """

    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup | None, local_tensor: Tensor, gather_dim: int, grad_scaler: bool = True,
        async_op: bool = False,
    ) -> Tensor:
        group = group or _ULYSSES_SEQUENCE_PARALLEL_GROUP
        size = get_ulysses_sequence_parallel_world_size(group)
        ctx.rank, ctx.gather_dim = get_ulysses_sequence_parallel_rank(group), gather_dim
        ctx.scale, ctx.widths = size if grad_scaler else 1, [local_tensor.shape[gather_dim]]
        if size == 1:
            return local_tensor
        width = torch.tensor([local_tensor.shape[gather_dim]], device=local_tensor.device)
        widths = [torch.empty_like(width) for _ in range(size)]
        dist.all_gather(widths, width, group=group)
        ctx.widths = [int(w) for w in widths]
        sent = _padded(local_tensor, gather_dim, max(ctx.widths) - local_tensor.shape[gather_dim]).contiguous()
        parts = [torch.empty_like(sent) for _ in range(size)]  # gloo gathers tensors of one shape only
        dist.all_gather(parts, sent, group=group)
        return torch.cat([p.narrow(gather_dim, 0, w) for p, w in zip(parts, ctx.widths, strict=True)], gather_dim)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        own = grad_output.split(ctx.widths, ctx.gather_dim)[ctx.rank].contiguous()
        return None, own * ctx.scale, None, None, None


def gather_seq_scatter_heads(
    x: Tensor, seq_dim: int, head_dim: int, unpadded_dim_size: int = 0, group: ProcessGroup | None = None
) -> Tensor:
    """A part of the sequence with all heads, [B, T / n, H, D] -> the full one with a part of them, [B, T, H / n, D].

    `unpadded_dim_size` is the sequence's length without padding, which is cut off; 0 keeps all positions.
    """
    group = group or _ULYSSES_SEQUENCE_PARALLEL_GROUP
    if get_ulysses_sequence_parallel_world_size(group) == 1:
        return x
    x = SeqAllToAll.apply(group, x, head_dim, seq_dim)
    return x.narrow(seq_dim, 0, unpadded_dim_size) if 0 < unpadded_dim_size < x.shape[seq_dim] else x


def gather_heads_scatter_seq(x: Tensor, head_dim: int, seq_dim: int, group: ProcessGroup | None = None) -> Tensor:
    """[B, T, H / n, D] -> [B, T / n, H, D], after T is padded to a multiple of the n ranks: inverse of the above."""
    group = group or _ULYSSES_SEQUENCE_PARALLEL_GROUP
    size = get_ulysses_sequence_parallel_world_size(group)
    if size == 1:
        return x
    return SeqAllToAll.apply(group, _padded(x, seq_dim, -x.shape[seq_dim] % size), seq_dim, head_dim)


def slice_input_tensor(x: Tensor, dim: int, padding: bool = True, group: ProcessGroup | None = None) -> Tensor:
    """This rank's part of `x` along `dim`, [B, T] -> [B, T / n]; with `padding` zeros first fill T to a multiple of n.

    Raises ValueError if the ranks cannot share `dim` evenly without padding.
    """
    size = get_ulysses_sequence_parallel_world_size(group)
    if padding:
        x = _padded(x, dim, -x.shape[dim] % size)
    _refuse_uneven(x, dim, size)
    share = x.shape[dim] // size
    return x.narrow(dim, get_ulysses_sequence_parallel_rank(group) * share, share).contiguous()


def gather_outputs_and_unpad(
    x: Tensor, gather_dim: int, unpad_dim: int | None = None, padding_size: int = 0, grad_scaler: bool = True,
    group: ProcessGroup | None = None,
) -> Tensor:
    """All ranks' parts along `gather_dim`, [B, T / n] -> [B, T], without the last `padding_size` of `unpad_dim`."""
    group = group or _ULYSSES_SEQUENCE_PARALLEL_GROUP
    if get_ulysses_sequence_parallel_world_size(group) == 1:
        return x
    x = Gather.apply(group, x, gather_dim, grad_scaler)
    if unpad_dim is not None and padding_size:
        x = x.narrow(unpad_dim, 0, x.shape[unpad_dim] - padding_size)
    return x


gather_outpus_and_unpad = gather_outputs_and_unpad  # upstream's spelling


def ulysses_pad(
    input_ids_rmpad: Tensor, position_ids_rmpad: Tensor | None = None, sp_size: int = 1
) -> tuple[Tensor, Tensor | None, int]:
    """input_ids [1, T] and position_ids [1, T] or [3, 1, T], padded until `sp_size` divides T; number of pads.

    The pads are token 0 at positions 0, 1, 2, ...: a sequence of their own.
    """
    pads = -input_ids_rmpad.shape[-1] % sp_size
    if pads:
        input_ids_rmpad = _padded(input_ids_rmpad, -1, pads)
        if position_ids_rmpad is not None:
            own = torch.arange(pads, device=position_ids_rmpad.device, dtype=position_ids_rmpad.dtype)
            own = own.expand(*position_ids_rmpad.shape[:-1], pads)
            position_ids_rmpad = torch.cat([position_ids_rmpad, own], -1)
    return input_ids_rmpad, position_ids_rmpad, pads


def ulysses_pad_and_slice_inputs(
    input_ids_rmpad: Tensor, position_ids_rmpad: Tensor | None = None, sp_size: int = 1,
    skip_position_ids_rmpad: bool = False,
) -> tuple[Tensor, Tensor | None, int]:
    """`ulysses_pad`, then this rank's part of both, [1, T / n]; `skip_position_ids_rmpad` leaves positions complete.

    Raises ValueError if `sp_size` is not the number of ranks in the group.
    """
    ranks = get_ulysses_sequence_parallel_world_size()
    if sp_size != ranks:
        raise ValueError(
            f"sp_size={sp_size}, but {ranks} ranks share a sequence; call set_ulysses_sequence_parallel_group with a "
            "group of that size."
        )
    ids, positions, pads = ulysses_pad(input_ids_rmpad, position_ids_rmpad, sp_size)
    ids = slice_input_tensor(ids, 1, padding=False)
    if positions is not None and not skip_position_ids_rmpad:
        positions = slice_input_tensor(positions, positions.ndim - 1, padding=False)
    return ids, positions, pads


def validate_ulysses_config(num_heads: int, ulysses_sequence_size: int) -> None:
    """Raise AssertionError if the ranks cannot share the attention heads evenly."""
    if ulysses_sequence_size > 1 and num_heads % ulysses_sequence_size:
        raise AssertionError(
            f"ulysses_sequence_parallel_size={ulysses_sequence_size} does not divide the model's {num_heads} attention "
            "heads; use a divisor."
        )


def _concatenated(parts: list[Tensor], dim: int, work: dist.Work) -> Tensor:
    work.wait()
    return torch.cat(parts, dim)


def _refuse_uneven(x: Tensor, dim: int, size: int) -> None:
    if x.shape[dim] % size:
        raise ValueError(f"{size} ranks cannot share dimension {dim} of {tuple(x.shape)} evenly.")


def _padded(x: Tensor, dim: int, pads: int) -> Tensor:
    dim %= x.ndim
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, pads]) if pads else x
