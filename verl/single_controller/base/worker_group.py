"""Groups of workers: where the ranks go, what class they run, which of its methods the group offers."""

from __future__ import annotations

import functools
import inspect
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from loguru import logger

from verl.protocol import DataProto, DataProtoFuture, concat_batches, unpad_dataproto
from verl.single_controller.base.dispatch import (
    MAGIC_ATTR,
    PADDING_KEY,
    Execute,
    dispatch_all_to_all,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
)


class ResourcePool:
    """How many ranks run on each node."""

    def __init__(
        self, process_on_nodes: list[int] | None = None, max_colocate_count: int = 10, n_gpus_per_node: int = 8
    ) -> None:
        self.store = list(process_on_nodes or [])
        if any(count < 1 for count in self.store):
            raise ValueError(f"process_on_nodes={self.store}: every node needs at least one rank")
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node

    def add_node(self, process_count: int) -> None:
        self.store.append(process_count)

    @property
    def world_size(self) -> int:
        return sum(self.store)

    def __call__(self) -> list[int]:
        return self.store

    def release(self) -> None:  # noqa: B027
        """Give back what the pool reserved."""

    def local_world_size_list(self) -> list[int]:
        """For every rank, how many ranks its node has."""
        return [count for count in self.store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For every rank, its number on its node."""
        return [local for count in self.store for local in range(count)]


class ClassWithInitArgs:
    """A class with the arguments for its construction, built later and elsewhere."""

    def __init__(self, cls: Any, *args, **kwargs) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.fused_worker_used = False

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)


def check_workers_alive(workers: list, is_alive: Callable, gap_time: float = 1) -> None:
    """Look at every worker every `gap_time` seconds, forever; end this process when one is gone."""
    while True:
        for rank, worker in enumerate(workers):
            if not is_alive(worker):
                logger.error(f"worker of rank {rank} is no longer alive ({worker}); ending the driver")
                signal.raise_signal(signal.SIGABRT)
        time.sleep(gap_time)


def _rank_zero_share(dispatch_fn: Callable, worker_group: WorkerGroup, *args, **kwargs) -> tuple[tuple, dict]:
    args, kwargs = dispatch_fn(worker_group, *args, **kwargs)
    return tuple(a[0] for a in args), {k: v[0] if isinstance(v, list) else v for k, v in kwargs.items()}


class WorkerGroup:
    """Ranks that run one class; the class's registered methods become methods of the group."""

    fused_worker_execute_fn_name = "_fuw_execute"

    def __init__(self, resource_pool: ResourcePool | None, **kwargs) -> None:
        self._workers: list = []
        self._worker_names: list[str] = []
        self.master_address: str | None = None
        self.master_port: str | None = None
        self._dispatch_info: dict[str, list[int]] = {}
        self._collect_info: dict[str, list[bool]] = {}

    def _is_worker_alive(self, worker: Any) -> bool:
        raise NotImplementedError(f"{type(self).__name__} cannot tell whether a worker is alive")

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Watch the workers from a thread, so that a death ends the driver even outside of a call."""
        watched = (self._workers, self._is_worker_alive, every_n_seconds)
        threading.Thread(target=check_workers_alive, args=watched, daemon=True).start()

    @property
    def workers(self) -> list[Any]:
        return self._workers

    @property
    def world_size(self) -> int:
        return len(self._workers)

    def _bind_method(self, name: str, attrs: dict[str, Any], func_generator: Callable, as_name: str) -> None:
        """Make the registered worker method `name` a method `as_name` of this group."""
        mode = attrs["dispatch_mode"]
        functions = mode if isinstance(mode, dict) else get_predefined_dispatch_fn(mode)
        dispatch_fn, collect_fn = functions["dispatch_fn"], functions["collect_fn"]
        if attrs["execute_mode"] == Execute.RANK_ZERO and dispatch_fn is not dispatch_all_to_all:
            dispatch_fn = functools.partial(_rank_zero_share, dispatch_fn)
        execute_fn = getattr(self, get_predefined_execute_fn(attrs["execute_mode"])["execute_fn_name"])
        setattr(self, as_name, func_generator(self, name, dispatch_fn, collect_fn, execute_fn, attrs["blocking"]))

    def _bind_worker_method(self, user_defined_cls: type, func_generator: Callable) -> list[str]:
        """Bind every registered method of the class; returns their names."""
        methods = registered_methods(user_defined_cls)
        for name, attrs in methods.items():
            self._bind_method(name, attrs, func_generator, as_name=name)
        return list(methods)


def registered_methods(cls: type) -> dict[str, dict[str, Any]]:
    """{name: what @register recorded} of a class and its bases; properties are not run."""
    members = {name: inspect.getattr_static(cls, name, None) for name in dir(cls)}
    functions = {name: member for name, member in members.items() if inspect.isfunction(member)}
    return {name: vars(f)[MAGIC_ATTR] for name, f in functions.items() if MAGIC_ATTR in vars(f)}


def func_generator(
    self: WorkerGroup, method_name: str, dispatch_fn: Callable, collect_fn: Callable, execute_fn: Callable,
    blocking: bool,
) -> Callable:
    """The group's method for the workers' `method_name`: dispatch, run, fetch when blocking, collect, drop padding."""

    def call(*args, **kwargs):
        args, kwargs = dispatch_fn(self, *args, **kwargs)
        padding = kwargs.pop(PADDING_KEY, None)
        output = execute_fn(method_name, *args, **kwargs)
        if blocking:
            output = self._fetch(output, method_name)
        output = collect_fn(self, output)
        if padding and isinstance(output, DataProto):
            output = _unpad(output, *padding)
        if padding and isinstance(output, DataProtoFuture):
            output.collect_fn = functools.partial(_concat_and_unpad, padding)
        return output

    call.__name__ = method_name
    return call


def _unpad(output: DataProto, padding: int, rows: int) -> DataProto:
    """Drop the results of the last `padding` of `rows` rows; generation returns several for each."""
    return unpad_dataproto(output, len(output) * padding // rows)


def _concat_and_unpad(padding: tuple[int, int], parts: list[DataProto]) -> DataProto:
    return _unpad(concat_batches(parts), *padding)
