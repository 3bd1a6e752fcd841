"""Compatibility with verl: import path of `verl.single_controller.base.dispatch`, and modes that no role here uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tensordict import TensorDict

from verl.protocol import DataProto, DataProtoFuture, concat_batches
from verl.single_controller.base.dispatch import *  # noqa: F403
from verl.single_controller.base.dispatch import (
    DISPATCH_MODE_FN_REGISTRY,
    Dispatch,
    check_ranks,
    collect_dp_compute_data_proto,
    get_predefined_dispatch_fn,
    mode_of,
    split_batches,
)
from verl.single_controller.base.dispatch import check_dispatch_mode as _check_dispatch_mode  # noqa: F401
from verl.single_controller.base.dispatch import check_execute_mode as _check_execute_mode  # noqa: F401

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup


def dummy_direct_rollout_call(worker_group: WorkerGroup, *args, **kwargs) -> None:
    """Stands for methods that a rollout server answers itself."""
    raise NotImplementedError("a DIRECT_ROLLOUT_METHOD is called on the rollout server, not through a worker group")


def dispatch_dp_compute(worker_group: WorkerGroup, *args, **kwargs) -> tuple[tuple, dict]:
    """The caller has cut each argument: a list or tuple with one entry per rank."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        check_ranks(f"argument {name!r}", value if isinstance(value, list | tuple) else [value], worker_group)
    return args, kwargs


def collect_dp_compute(worker_group: WorkerGroup, output: list) -> list:
    """One output a rank, in rank order."""
    check_ranks("the output", output, worker_group)
    return output


def dispatch_dp_compute_data_proto(worker_group: WorkerGroup, *args, **kwargs) -> tuple[tuple, dict]:
    """Each DataProto or TensorDict is cut in as many parts as there are ranks."""
    return split_batches(worker_group.world_size, args, kwargs)


def collect_nd_compute(collect_mask: list[bool], worker_group: WorkerGroup, output: list) -> list:
    """Outputs of the ranks whose mask is True (one rank of each data-parallel group)."""
    check_ranks("collect_mask", collect_mask, worker_group)
    return [o for o, wanted in zip(output, collect_mask, strict=True) if wanted]


def collect_nd_compute_dataproto(
    collect_mask: list[bool], worker_group: WorkerGroup, output: list
) -> DataProto | TensorDict | DataProtoFuture:
    """The rows of the ranks whose mask is True."""
    return concat_batches(collect_nd_compute(collect_mask, worker_group, output))


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: Callable, collect_fn: Callable) -> None:
    """Add a mode: afterwards `Dispatch.<NAME>` can be given to `register`."""
    DISPATCH_MODE_FN_REGISTRY[Dispatch.register(dispatch_mode_name)] = mode_of(dispatch_fn, collect_fn)


def update_dispatch_mode(dispatch_mode: Dispatch, dispatch_fn: Callable, collect_fn: Callable) -> None:
    """Replace the functions of a mode that is registered."""
    get_predefined_dispatch_fn(dispatch_mode).update(mode_of(dispatch_fn, collect_fn))


DISPATCH_MODE_FN_REGISTRY |= {
    Dispatch.DP_COMPUTE: mode_of(dispatch_dp_compute, collect_dp_compute),
    Dispatch.DP_COMPUTE_PROTO: mode_of(dispatch_dp_compute_data_proto, collect_dp_compute_data_proto),
    Dispatch.DP_COMPUTE_METRIC: mode_of(dispatch_dp_compute_data_proto, collect_dp_compute),
    Dispatch.DIRECT_ROLLOUT_METHOD: mode_of(dummy_direct_rollout_call, dummy_direct_rollout_call),
}
