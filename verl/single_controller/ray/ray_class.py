"""RayClassWithInitArgs: an actor class with its constructor's arguments and the options it is started with."""

from __future__ import annotations

from typing import Any

import ray
from ray.actor import ActorClass, ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from verl.single_controller.base.worker_group import ClassWithInitArgs


class RayClassWithInitArgs(ClassWithInitArgs):
    """`cls` is what ray.remote gave, or a plain class, which is then made remote here."""

    def __init__(self, cls: Any, *args, **kwargs) -> None:
        super().__init__(cls if isinstance(cls, ActorClass) else ray.remote(cls), *args, **kwargs)
        self._options: dict[str, Any] = {}
        self._additional_resource: dict[str, float] = {}

    def set_additional_resource(self, additional_resource: dict[str, float]) -> None:
        """Custom Ray resources that every rank asks for."""
        self._additional_resource = additional_resource

    def update_options(self, options: dict) -> None:
        """Options of the actor (name, runtime_env, ...) for the next construction."""
        self._options.update(options)

    def __call__(
        self,
        placement_group: PlacementGroup,
        placement_group_bundle_idx: int,
        use_gpu: bool = True,
        num_gpus: float = 1,
        sharing_with: ActorHandle | None = None,
        device_name: str = "cuda",
    ) -> ActorHandle:
        """Start one actor in the bundle, or on the node and GPUs of the actor `sharing_with`."""
        if sharing_with is not None:
            node = ray.get(sharing_with.get_node_id.remote())
            visible = ray.get(sharing_with.get_cuda_visible_devices.remote())
            there = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False)}
            kwargs = {**self.kwargs, "cuda_visible_devices": visible}
            return self.cls.options(**{**self._options, **there}).remote(*self.args, **kwargs)
        options = {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=placement_group, placement_group_bundle_index=placement_group_bundle_idx
            ),
            **self._options,
        }
        if use_gpu and device_name == "cuda":
            options["num_gpus"] = num_gpus
        if self._additional_resource:
            options["resources"] = dict(self._additional_resource)
        return self.cls.options(**options).remote(*self.args, **self.kwargs)
