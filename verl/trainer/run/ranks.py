"""Collective operations on Python values; without a process group, this process is the only rank."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def is_first_rank() -> bool:
    """Whether this is rank 0."""
    return not dist.is_initialized() or dist.get_rank() == 0


def all_reduce_values(
    values: Mapping[str, float], device: torch.device, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> dict[str, float]:
    """Sum (or another `op`) of each value over ranks, in float64; all ranks pass the same names in the same order."""
    total = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(total, op)
    return dict(zip(values, total.tolist(), strict=True))


def all_reduce_max(values: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """Maximum of each value over ranks."""
    return all_reduce_values(values, device, dist.ReduceOp.MAX)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on some rank."""
    return all_reduce_values({"flag": float(flag)}, device)["flag"] > 0


def all_gather_object(value: T) -> list[T]:
    """The values of all ranks, in rank order."""
    if not dist.is_initialized():
        return [value]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def from_first_rank(make: Callable[[], T]) -> T:
    """The result of `make` on rank 0, on every rank; if it raises, every rank raises."""
    if not dist.is_initialized():
        return make()
    answer: list = [None, None]  # result, text of an error
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer[0] = make()
        except Exception as e:  # sent to the other ranks first, then raised below
            error, answer[1] = e, str(e)
    dist.broadcast_object_list(answer, src=0)
    if error is not None:
        raise error
    if answer[1] is not None:
        raise RuntimeError(f"rank 0: {answer[1]}")
    return answer[0]
