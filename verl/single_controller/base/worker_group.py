"""Groups of workers: where the ranks go, what class they run, which of its methods the group offers."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from loguru import logger

from verl.single_controller.base.decorator import (
    MAGIC_ATTR,
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
        self._store = list(process_on_nodes or [])
        if any(count < 1 for count in self._store):
            raise ValueError(f"process_on_nodes={self._store}: every node needs at least one rank")
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node

    def add_node(self, process_count: int) -> None:
        self._store.append(process_count)

    @property
    def world_size(self) -> int:
        return sum(self._store)

    def __call__(self) -> list[int]:
        return self._store

    @property
    def store(self) -> list[int]:
        return self._store

    def local_world_size_list(self) -> list[int]:
        """For every rank, how many ranks its node has."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For every rank, its number on its node."""
        return [local for count in self._store for local in range(count)]


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
    """Look at every worker each `gap_time` seconds, for ever; end this process when one is gone."""
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
        self._is_init_with_detached_workers = resource_pool is None
        self._workers: list = []
        self._worker_names: list[str] = []
        self._master_addr: str | None = None
        self._master_port: str | None = None
        self._dispatch_info: dict[str, list[int]] = {}
        self._collect_info: dict[str, list[bool]] = {}
        self._checker_thread: threading.Thread | None = None

    def _is_worker_alive(self, worker: Any) -> bool:
        raise NotImplementedError(f"{type(self).__name__} cannot tell whether a worker is alive")

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Watch the workers from a thread, so that a death ends the driver even outside of a call."""
        self._checker_thread = threading.Thread(
            target=check_workers_alive, args=(self._workers, self._is_worker_alive, every_n_seconds), daemon=True
        )
        self._checker_thread.start()

    @property
    def world_size(self) -> int:
        return len(self._workers)

    def _bind_method(self, name: str, attrs: dict[str, Any], func_generator: Callable, as_name: str) -> None:
        """Make the registered worker method `name` a method `as_name` of this group."""
        mode = attrs["dispatch_mode"]
        functions = mode if isinstance(mode, dict) else get_predefined_dispatch_fn(mode)
        dispatch_fn, collect_fn = functions["dispatch_fn"], functions["collect_fn"]
        execute_mode = attrs["execute_mode"]
        if execute_mode == Execute.RANK_ZERO and dispatch_fn is not dispatch_all_to_all:
            dispatch_fn = functools.partial(_rank_zero_share, dispatch_fn)
        execute_fn = getattr(self, get_predefined_execute_fn(execute_mode)["execute_fn_name"])
        bound = func_generator(
            self,
            name,
            dispatch_fn=dispatch_fn,
            collect_fn=collect_fn,
            execute_fn=execute_fn,
            blocking=attrs["blocking"],
        )
        setattr(self, as_name, bound)

    def _bind_worker_method(self, user_defined_cls: type, func_generator: Callable) -> list[str]:
        """Bind every registered method of the class; returns their names."""
        names = []
        for name, attrs in registered_methods(user_defined_cls).items():
            self._bind_method(name, attrs, func_generator, as_name=name)
            names.append(name)
        return names


def registered_methods(cls: type) -> dict[str, dict[str, Any]]:
    """{name: what @register recorded} of a class and its bases."""
    found = {}
    for name in dir(cls):
        member = _static(cls, name)
        if callable(member) and MAGIC_ATTR in _attributes(member):
            found[name] = _attributes(member)[MAGIC_ATTR]
    return found


def _static(cls: type, name: str) -> Any:
    """The class's own entry, without running descriptors such as properties."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _attributes(member: Any) -> dict[str, Any]:
    return member.__dict__ if isinstance(member, type(registered_methods)) else {}


def local_environment() -> dict[str, str]:
    """Variables of the driver that decide how many threads a rank uses."""
    return {k: os.environ[k] for k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if k in os.environ}
