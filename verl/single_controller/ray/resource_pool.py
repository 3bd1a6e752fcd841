"""Reserves resources for ranks: one placement group per node, one bundle per rank."""

import secrets
import string
from itertools import groupby

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from verl.single_controller.base.worker_group import ResourcePool

READY_TIMEOUT_S = 300
HOPELESS_TIMEOUT_S = 15  # when the cluster is too small: only a growing cluster can still help


def get_random_string(length: int) -> str:
    """Lower-case letters and digits for names that must not collide."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(length))


def node_of_bundle(group: PlacementGroup, bundle: int) -> str:
    """Node id on which a bundle of a ready placement group is placed."""
    return placement_group_table(group)["bundles_to_node_id"][bundle]


def sort_placement_group_by_node_ip(pgs: list[PlacementGroup]) -> list[PlacementGroup]:
    """By the address of the first bundle's node, so that ranks meet the same nodes again after a restart."""
    ips = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def address(group: PlacementGroup) -> tuple:
        ip = ips[node_of_bundle(group, 0)]
        return tuple(int(part) if part.isdigit() else part for part in ip.split("."))

    return sorted(pgs, key=address)


class RayResourcePool(ResourcePool):
    """Ranks per node, reserved in Ray when first used: 1 CPU per rank, with 1 GPU unless `use_gpu` is False.

    `max_colocate_count` groups may share the pool; each of their ranks takes that share of its bundle.
    """

    def __init__(
        self, process_on_nodes: list[int] | None = None, use_gpu: bool = True, name_prefix: str | None = None,
        max_colocate_count: int = 10, detached: bool = False, accelerator_type: str | None = None,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = get_random_string(length=6) if name_prefix is None else name_prefix
        self.pgs: list[PlacementGroup] | None = None
        self.detached = detached
        self.accelerator_type = accelerator_type

    def _bundle(self) -> dict[str, float]:
        kind = {} if self.accelerator_type is None else {self.accelerator_type: 1e-4}
        return {"CPU": 1, "GPU": 1, **kind} if self.use_gpu else {"CPU": 1}

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """One placement group per node, ready, in the order of the nodes' addresses; reserved on the first call."""
        if self.pgs is not None:
            return self.pgs
        prefix = name or f"{self.name_prefix}verl_group_" + "_".join(map(str, self.store))
        lifetime = "detached" if self.detached else None
        groups = [
            placement_group([self._bundle() for _ in range(count)], strategy, name=f"{prefix}:{i}", lifetime=lifetime)
            for i, count in enumerate(self.store)
        ]
        try:
            self._wait_until_ready(groups)
        except Exception:
            for group in groups:
                remove_placement_group(group)
            raise
        self.pgs = sort_placement_group_by_node_ip(groups)
        return self.pgs

    def _wait_until_ready(self, groups: list[PlacementGroup]) -> None:
        need = {key: value * self.world_size for key, value in self._bundle().items()}
        there = ray.cluster_resources()
        lacking = any(there.get(key, 0) < value for key, value in need.items())
        for group in groups:
            if not group.wait(HOPELESS_TIMEOUT_S if lacking else READY_TIMEOUT_S):
                free = {key: ray.available_resources().get(key, 0) for key in need}
                have = {key: there.get(key, 0) for key in need}
                raise RuntimeError(
                    f"resource pool {self.store} needs {need} in bundles of one node each; the Ray cluster has {have} "
                    f"in all and {free} free. Lower trainer.n_gpus_per_node or nnodes, or add nodes"
                )

    def bundles(self, strategy: str, device_name: str) -> list[tuple[PlacementGroup, int, int, int]]:
        """For every rank: placement group, bundle, local rank, local world size."""
        groups = self.get_placement_groups(strategy=strategy, device_name=device_name)
        slots = zip(groups, self.store, strict=True)
        return [(group, local, local, count) for group, count in slots for local in range(count)]

    def release(self) -> None:
        """Release the reserved resources; actors that still run there are ended by Ray."""
        for group in self.pgs or []:
            remove_placement_group(group)
        self.pgs = None


class SubRayResourcePool(RayResourcePool):
    """Some consecutive bundles of a pool that is reserved already."""

    def __init__(
        self, placement_groups: list[PlacementGroup], start_bundle_index: int, subgroup_world_size: int, **kwargs
    ) -> None:
        flat = [(group, i) for group in placement_groups for i in range(group.bundle_count)]
        self._own = flat[start_bundle_index : start_bundle_index + subgroup_world_size]
        super().__init__(**kwargs)
        self.store = [len(list(rows)) for _, rows in groupby(self._own, lambda bundle: bundle[0])]
        self.pgs = placement_groups
        self.start_bundle_index, self.subgroup_world_size = start_bundle_index, subgroup_world_size
        if len(self._own) != subgroup_world_size:
            last = start_bundle_index + subgroup_world_size - 1
            raise ValueError(f"bundles {start_bundle_index}..{last} are requested; the pool has {len(flat)}")

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
