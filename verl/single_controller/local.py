"""LocalWorkerGroup: the roles of a single rank in this process, without Ray, for debuggers and tests."""

import os
from typing import Any

import torch.distributed as dist
from loguru import logger
from tensordict import TensorDict

from verl.protocol import DataProto
from verl.single_controller.base.worker_group import (
    ClassWithInitArgs,
    ResourcePool,
    WorkerGroup,
    func_generator,
)
from verl.single_controller.ray.ray_class import role_classes, user_class
from verl.utils.distributed import ensure_process_group

RANK_ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


class LocalWorkerGroup(WorkerGroup):
    """Runs one rank of a class in this process; constructed and called like a RayWorkerGroup.

    Registered methods dispatch and collect as on one Ray rank. A breakpoint in worker code works, and an exception
    arrives with its own traceback. The group sets the rank's environment variables and starts a process group of one
    rank if there is none; `shutdown` undoes both. Raises ValueError for a pool with more than one rank.
    """

    def __init__(
        self, resource_pool: ResourcePool, ray_cls_with_init: ClassWithInitArgs, device_name: str = "cpu", **kwargs: Any
    ) -> None:
        super().__init__(resource_pool=resource_pool)
        if resource_pool.world_size != 1:
            raise ValueError(
                f"trainer.local=true runs one rank in this process, but {resource_pool.world_size} are requested. "
                "Set trainer.nnodes=1 and trainer.n_gpus_per_node=1."
            )
        self.ray_cls_with_init = ray_cls_with_init
        self._environment = {name: os.environ.get(name) for name in RANK_ENVIRONMENT}
        os.environ.update(RANK_ENVIRONMENT)
        self._owns_process_group = not dist.is_initialized()
        ensure_process_group(device_name)
        cls = user_class(ray_cls_with_init.cls)
        self._workers = [cls(*ray_cls_with_init.args, **ray_cls_with_init.kwargs)]
        self._bind_worker_method(cls, func_generator)

    def spawn(self, prefix_set: set[str]) -> dict[str, WorkerGroup]:
        """One group per role of a colocated class, over the same worker objects."""
        roles = role_classes(self.ray_cls_with_init)
        return {role: _RoleGroup(self._workers[0].fused_worker_dict[role], roles[role]) for role in prefix_set}

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the rank; a list with its output. An argument that is a list of one entry is the rank's share."""
        values = [*args, *kwargs.values()]
        if values and all(isinstance(value, list) and len(value) == 1 for value in values):
            args, kwargs = tuple(value[0] for value in args), {k: v[0] for k, v in kwargs.items()}
        return [self.execute_rank_zero_sync(method_name, *args, **kwargs)]

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the rank with the arguments as they are."""
        args, kwargs = tuple(map(_own_columns, args)), {k: _own_columns(v) for k, v in kwargs.items()}
        return getattr(self._workers[0], method_name)(*args, **kwargs)

    execute_all = execute_all_async = execute_all_sync
    execute_rank_zero = execute_rank_zero_async = execute_rank_zero_sync

    def _fetch(self, outputs: Any, method_name: str) -> Any:
        return outputs

    def try_execute_all(self, method_name: str, timeout_s: float) -> None:
        """Call the rank; an error is logged. There is no time limit in one process."""
        try:
            self.execute_all_sync(method_name)
        except Exception as error:
            logger.warning(f"{method_name} failed: {error}")

    def shutdown(self) -> None:
        """Drop the worker, end the process group that this group started, restore the environment."""
        self._workers = []
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _RoleGroup(LocalWorkerGroup):
    """The methods of one role of a LocalWorkerGroup, which owns process group and environment."""

    def __init__(self, worker: Any, cls: type) -> None:
        WorkerGroup.__init__(self, resource_pool=None)
        self._workers = [worker]
        self._bind_worker_method(cls, func_generator)

    def shutdown(self) -> None:
        """Nothing: the group of the process ends."""


def _own_columns(value: Any) -> Any:
    """A batch whose columns and meta_info can be replaced without affecting the caller's."""
    if isinstance(value, TensorDict):
        return value.clone(recurse=False)
    if not isinstance(value, DataProto):
        return value
    batch = None if value.batch is None else value.batch.clone(recurse=False)
    return DataProto(batch, dict(value.non_tensor_batch), dict(value.meta_info))
