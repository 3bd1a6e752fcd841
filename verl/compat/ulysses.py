"""Compatibility with verl: the split of inputs and outputs for sequence parallelism."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from verl.compat.torch_functional import gather_tensors
from verl.training.parallel.sequence_parallel import *  # noqa: F403
from verl.training.parallel.sequence_parallel import (
    check_even,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_world_size,
    pad_dim,
)


def get_ulysses_sequence_parallel_rank(group: ProcessGroup | None = None) -> int:
    """This process's rank among them."""
    group = group or get_ulysses_sequence_parallel_group()
    return dist.get_rank(group) if group is not None else 0


class Gather(torch.autograd.Function):
    """All parts along `gather_dim`, [B, T / n, ...] -> [B, T, ...]; parts may differ in size along `gather_dim` only.

    The backward takes this rank's part of the gradient, times the number of ranks with `grad_scaler`.
    """

    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup | None, local_tensor: Tensor, gather_dim: int, grad_scaler: bool = True,
        async_op: bool = False,
    ) -> Tensor:
        group = group or get_ulysses_sequence_parallel_group()
        size = get_ulysses_sequence_parallel_world_size(group)
        ctx.rank, ctx.gather_dim = get_ulysses_sequence_parallel_rank(group), gather_dim
        ctx.scale, ctx.widths = size if grad_scaler else 1, [local_tensor.shape[gather_dim]]
        if size == 1:
            return local_tensor
        width = torch.tensor(ctx.widths, device=local_tensor.device)
        ctx.widths = torch.cat(gather_tensors(width, size, group)).tolist()
        sent = pad_dim(local_tensor, gather_dim, max(ctx.widths) - local_tensor.shape[gather_dim])
        parts = zip(gather_tensors(sent, size, group), ctx.widths, strict=True)
        return torch.cat([part.narrow(gather_dim, 0, width) for part, width in parts], gather_dim)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        own = grad_output.split(ctx.widths, ctx.gather_dim)[ctx.rank].contiguous()
        return None, own * ctx.scale, None, None, None


def slice_input_tensor(x: Tensor, dim: int, padding: bool = True, group: ProcessGroup | None = None) -> Tensor:
    """This rank's part of `x` along `dim`, [B, T] -> [B, T / n]; with `padding`, zeros fill T to a multiple of n."""
    size = get_ulysses_sequence_parallel_world_size(group)
    if padding:
        x = pad_dim(x, dim, -x.shape[dim] % size)
    check_even(x, dim, size)
    share = x.shape[dim] // size
    return x.narrow(dim, get_ulysses_sequence_parallel_rank(group) * share, share).contiguous()


def gather_outputs_and_unpad(
    x: Tensor, gather_dim: int, unpad_dim: int | None = None, padding_size: int = 0, grad_scaler: bool = True,
    group: ProcessGroup | None = None,
) -> Tensor:
    """All ranks' parts along `gather_dim`, [B, T / n] -> [B, T], without the last `padding_size` of `unpad_dim`."""
    if get_ulysses_sequence_parallel_world_size(group) == 1:
        return x
    x = Gather.apply(group, x, gather_dim, grad_scaler)
    if unpad_dim is not None and padding_size:
        x = x.narrow(unpad_dim, 0, x.shape[unpad_dim] - padding_size)
    return x


gather_outpus_and_unpad = gather_outputs_and_unpad  # verl's spelling


def ulysses_pad(
    input_ids_rmpad: Tensor, position_ids_rmpad: Tensor | None = None, sp_size: int = 1
) -> tuple[Tensor, Tensor | None, int]:
    """input_ids [1, T] and position_ids [1, T] or [3, 1, T] with n pads, as a sequence of their own, at the end; n."""
    pads = -input_ids_rmpad.shape[-1] % sp_size
    if pads:
        input_ids_rmpad = pad_dim(input_ids_rmpad, -1, pads)
        if position_ids_rmpad is not None:
            own = torch.arange(pads, device=position_ids_rmpad.device, dtype=position_ids_rmpad.dtype)
            position_ids_rmpad = torch.cat([position_ids_rmpad, own.expand(*position_ids_rmpad.shape[:-1], pads)], -1)
    return input_ids_rmpad, position_ids_rmpad, pads


def ulysses_pad_and_slice_inputs(
    input_ids_rmpad: Tensor, position_ids_rmpad: Tensor | None = None, sp_size: int = 1,
    skip_position_ids_rmpad: bool = False,
) -> tuple[Tensor, Tensor | None, int]:
    """`ulysses_pad`, then this rank's part of both, [1, T / n]; `skip_position_ids_rmpad` leaves positions complete."""
    ranks = get_ulysses_sequence_parallel_world_size()
    if sp_size != ranks:
        what = f"sp_size={sp_size}, but {ranks} ranks share a sequence"
        raise ValueError(f"{what}; call set_ulysses_sequence_parallel_group with a group of that size.")
    ids, positions, pads = ulysses_pad(input_ids_rmpad, position_ids_rmpad, sp_size)
    if positions is not None and not skip_position_ids_rmpad:
        positions = slice_input_tensor(positions, -1, padding=False)
    return slice_input_tensor(ids, 1, padding=False), positions, pads
