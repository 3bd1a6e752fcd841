"""Several roles in one process: worker classes that hold one worker of each role."""

from __future__ import annotations

import inspect
from typing import Any

import ray
from ray.actor import ActorClass

from verl.single_controller.base.decorator import MAGIC_ATTR
from verl.single_controller.base.worker import Worker
from verl.single_controller.base.worker_group import registered_methods
from verl.single_controller.ray.ray_class import RayClassWithInitArgs

FUSED_SEPARATOR = "_fwmn_"


def unwrap(cls: Any) -> type:
    """The user's own class behind an actor class."""
    return cls.__ray_metadata__.modified_class if isinstance(cls, ActorClass) else cls


def _builders(class_dict: dict[str, RayClassWithInitArgs]) -> dict[str, tuple[type, tuple, dict]]:
    if not class_dict:
        raise ValueError("colocated workers need at least one role")
    return {role: (_own_class(c.cls), c.args, c.kwargs) for role, c in class_dict.items()}


def _own_class(cls: Any) -> type:
    """Without the subclass that Ray puts in front: a role inside another process is no actor."""
    user = unwrap(cls)
    return user.__mro__[1] if isinstance(cls, ActorClass) and user.__name__ == user.__mro__[1].__name__ else user


def role_classes(ray_cls_with_init: RayClassWithInitArgs | None) -> dict[str, type]:
    """{role: class} of a colocated or fused class; empty for any other."""
    if ray_cls_with_init is None:
        return {}
    return vars(_own_class(ray_cls_with_init.cls)).get("role_classes", {})


def create_colocated_worker_raw_cls(class_dict: dict[str, RayClassWithInitArgs]) -> type:
    """A plain worker class with one worker of each role; the roles find each other by name."""
    builders = _builders(class_dict)

    class FusedWorker(Worker):
        role_classes = {role: cls for role, (cls, _, _) in builders.items()}

        def __init__(self) -> None:
            super().__init__()
            self.fused_worker_dict = {}
            for role, (cls, args, kwargs) in builders.items():
                self.fused_worker_dict[role] = cls(*args, **kwargs)
            for worker in self.fused_worker_dict.values():
                worker.fused_worker_dict = self.fused_worker_dict

        def _fuw_execute(self, method_name: str, *args, **kwargs) -> Any:
            """Run "<role>_fwmn_<method>" on the worker of that role."""
            role, _, name = method_name.partition(FUSED_SEPARATOR)
            return getattr(self.fused_worker_dict[role], name)(*args, **kwargs)

    FusedWorker.__name__ = FusedWorker.__qualname__ = "FusedWorker_" + "_".join(builders)
    return FusedWorker


def create_colocated_worker_cls_fused(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Actor class of the fused roles, ready for a RayWorkerGroup."""
    fused = RayClassWithInitArgs(cls=ray.remote(create_colocated_worker_raw_cls(class_dict)))
    fused.fused_worker_used = True
    return fused


def create_colocated_worker_cls(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Actor class that offers `<role>_<method>` for every registered method of every role."""
    base = create_colocated_worker_raw_cls(class_dict)

    class WorkerDict(base):
        role_classes = base.role_classes

    for role, cls in base.role_classes.items():
        for name, attrs in registered_methods(cls).items():
            member = _forward(role, name, inspect.iscoroutinefunction(vars_of(cls, name)))
            setattr(member, MAGIC_ATTR, attrs)
            setattr(WorkerDict, f"{role}_{name}", member)
    WorkerDict.__name__ = WorkerDict.__qualname__ = "WorkerDict_" + "_".join(base.role_classes)
    return RayClassWithInitArgs(cls=ray.remote(WorkerDict))


def vars_of(cls: type, name: str) -> Any:
    """The function `name` as the class or one of its bases defines it."""
    return next(vars(base)[name] for base in cls.__mro__ if name in vars(base))


def _forward(role: str, name: str, is_async: bool) -> Any:
    def call(self, *args, **kwargs):
        return getattr(self.fused_worker_dict[role], name)(*args, **kwargs)

    async def call_async(self, *args, **kwargs):
        return await getattr(self.fused_worker_dict[role], name)(*args, **kwargs)

    forward = call_async if is_async else call
    forward.__name__ = f"{role}_{name}"
    return forward
