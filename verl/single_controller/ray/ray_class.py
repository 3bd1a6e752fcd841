"""Actor classes with their constructors' arguments: one role per process, or several roles that share one."""

import inspect
from typing import Any

import ray
from ray.actor import ActorClass, ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from verl.single_controller.base.dispatch import MAGIC_ATTR
from verl.single_controller.base.worker import Worker
from verl.single_controller.base.worker_group import ClassWithInitArgs, registered_methods

FUSED_SEPARATOR = "_fwmn_"


class RayClassWithInitArgs(ClassWithInitArgs):
    """`cls` is what ray.remote gave, or a plain class, which is then made remote here."""

    def __init__(self, cls: Any, *args, **kwargs) -> None:
        super().__init__(cls if isinstance(cls, ActorClass) else ray.remote(cls), *args, **kwargs)
        self._options: dict[str, Any] = {}

    def set_additional_resource(self, additional_resource: dict[str, float]) -> None:
        """Custom Ray resources that every rank requests."""
        self._options["resources"] = dict(additional_resource)

    def update_options(self, options: dict) -> None:
        """Options of the actor (name, runtime_env, ...) for the next construction."""
        self._options.update(options)

    def __call__(
        self, placement_group: PlacementGroup, placement_group_bundle_idx: int, use_gpu: bool = True,
        num_gpus: float = 1, sharing_with: ActorHandle | None = None, device_name: str = "cuda",
    ) -> ActorHandle:
        """Start one actor in the bundle, or on the node and GPUs of the actor `sharing_with`."""
        kwargs, options = dict(self.kwargs), {}
        if sharing_with is not None:
            node = ray.get(sharing_with.get_node_id.remote())
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            kwargs["cuda_visible_devices"] = ray.get(sharing_with.get_cuda_visible_devices.remote())
        else:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=placement_group, placement_group_bundle_index=placement_group_bundle_idx
            )
            if use_gpu and device_name == "cuda":
                options["num_gpus"] = num_gpus
        return self.cls.options(**{**self._options, **options}).remote(*self.args, **kwargs)


def unwrap(cls: Any) -> type:
    """The user's own class that an actor class wraps."""
    return cls.__ray_metadata__.modified_class if isinstance(cls, ActorClass) else cls


def user_class(cls: Any) -> type:
    """The class that the user wrote, without the subclass that Ray derives from it for an actor."""
    user = unwrap(cls)
    return user.__mro__[1] if isinstance(cls, ActorClass) and user.__name__ == user.__mro__[1].__name__ else user


def role_classes(ray_cls_with_init: RayClassWithInitArgs | None) -> dict[str, type]:
    """{role: class} of a colocated or fused class; empty for any other."""
    return {} if ray_cls_with_init is None else getattr(user_class(ray_cls_with_init.cls), "role_classes", {})


def create_colocated_worker_raw_cls(class_dict: dict[str, RayClassWithInitArgs]) -> type:
    """A plain worker class with one worker of each role: an attribute of the role's name, and in `fused_worker_dict`.

    A subclass of it, made remote by `ray.remote`, may call its roles directly. The roles find each other by name.
    """
    if not class_dict:
        raise ValueError("colocated workers need at least one role")
    if taken := [role for role in class_dict if hasattr(Worker, role)]:
        raise ValueError(f"role {taken[0]!r} has the name of a method of Worker; choose another name")
    builders = {role: (user_class(c.cls), c.args, c.kwargs) for role, c in class_dict.items()}

    class FusedWorker(Worker):
        role_classes = {role: cls for role, (cls, _, _) in builders.items()}

        def __init__(self) -> None:
            super().__init__()
            self.fused_worker_dict = {role: cls(*args, **kwargs) for role, (cls, args, kwargs) in builders.items()}
            for role, worker in self.fused_worker_dict.items():
                worker.fused_worker_dict = self.fused_worker_dict
                setattr(self, role, worker)

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
            member = _forward(role, name, inspect.iscoroutinefunction(inspect.getattr_static(cls, name)))
            setattr(member, MAGIC_ATTR, attrs)
            setattr(WorkerDict, f"{role}_{name}", member)
    WorkerDict.__name__ = WorkerDict.__qualname__ = "WorkerDict_" + "_".join(base.role_classes)
    return RayClassWithInitArgs(cls=ray.remote(WorkerDict))


def _forward(role: str, name: str, is_async: bool) -> Any:
    def call(self, *args, **kwargs):
        return getattr(self.fused_worker_dict[role], name)(*args, **kwargs)

    async def call_async(self, *args, **kwargs):
        return await call(self, *args, **kwargs)

    forward = call_async if is_async else call
    forward.__name__ = f"{role}_{name}"
    return forward
