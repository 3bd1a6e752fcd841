"""Compatibility with verl: import path of Ray's worker groups, and pools that share the places of other pools."""
# ruff: noqa: F401

from ray.util.placement_group import PlacementGroup

from verl.single_controller.base.worker import get_master_addr_port
from verl.single_controller.base.worker_group import func_generator
from verl.single_controller.ray.fetch import WorkerDiedError
from verl.single_controller.ray.ray_class import *  # noqa: F403
from verl.single_controller.ray.resource_pool import RayResourcePool, get_random_string, sort_placement_group_by_node_ip
from verl.single_controller.ray.worker_group import RayWorkerGroup


class SubRayResourcePool(RayResourcePool):
    """Some consecutive bundles of a pool that is reserved already."""

    def __init__(
        self, placement_groups: list[PlacementGroup], start_bundle_index: int, subgroup_world_size: int, **kwargs
    ) -> None:
        super().__init__(**kwargs)
        self.pgs = placement_groups
        self.start_bundle_index = start_bundle_index
        self.subgroup_world_size = subgroup_world_size
        flat = [(group, i) for group in placement_groups for i in range(group.bundle_count)]
        self._own = flat[start_bundle_index : start_bundle_index + subgroup_world_size]
        if len(self._own) != subgroup_world_size:
            last = start_bundle_index + subgroup_world_size - 1
            raise ValueError(f"bundles {start_bundle_index}..{last} are requested; the pool has {len(flat)}")
        counts = [sum(g is group for g, _ in self._own) for group in placement_groups]
        self.store = [count for count in counts if count]

    def bundles(self, strategy: str, device_name: str) -> list[tuple[PlacementGroup, int, int, int]]:
        slots = zip(self._own, self.local_rank_list(), self.local_world_size_list(), strict=True)
        return [(group, bundle, local, count) for (group, bundle), local, count in slots]

    def release(self) -> None:
        raise ValueError("a sub-pool does not own its resources; release the pool it was split from")


def split_resource_pool(
    resource_pool: RayResourcePool | SubRayResourcePool, split_size: int | list[int]
) -> list[SubRayResourcePool]:
    """Sub-pools of the given sizes, or of `split_size` ranks each; the sizes must add up to the pool."""
    total = resource_pool.world_size
    sizes = [split_size] * (total // max(1, split_size)) if isinstance(split_size, int) else split_size
    if sum(sizes) != total or min(sizes) < 1:
        raise ValueError(f"split_size={split_size}: such parts do not add up to the pool's {total} ranks")
    start = resource_pool.start_bundle_index if isinstance(resource_pool, SubRayResourcePool) else 0
    shared = {"use_gpu": resource_pool.use_gpu, "max_colocate_count": resource_pool.max_colocate_count}
    groups, parts = resource_pool.get_placement_groups(), []
    for number, size in enumerate(sizes):
        prefix = f"{resource_pool.name_prefix}_split_{number}"
        first = start + sum(sizes[:number])
        parts.append(SubRayResourcePool(groups, first, size, name_prefix=prefix, **shared))
    return parts


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """One pool with the nodes of both; it uses their placement groups."""
    for name in ("use_gpu", "max_colocate_count", "n_gpus_per_node", "detached"):
        if getattr(rp1, name) != getattr(rp2, name):
            raise ValueError(f"pools with {name}={getattr(rp1, name)} and {getattr(rp2, name)} cannot be merged")
    prefix = f"{rp1.name_prefix}_{rp2.name_prefix}"
    merged = RayResourcePool(rp1.store + rp2.store, rp1.use_gpu, prefix, rp1.max_colocate_count, rp1.detached)
    merged.pgs = rp1.get_placement_groups() + rp2.get_placement_groups()
    return merged
