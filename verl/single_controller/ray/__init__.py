"""Worker groups over Ray."""

from verl.single_controller.ray.ray_class import (
    RayClassWithInitArgs,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
)
from verl.single_controller.ray.resource_pool import RayResourcePool
from verl.single_controller.ray.worker_group import RayWorkerGroup

__all__ = [
    "RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup", "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
]  # fmt: skip
