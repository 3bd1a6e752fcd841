"""Reserves resources for ranks: one placement group for each entry of a pool's `store`, one bundle per rank."""

import secrets
import string
from itertools import groupby

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from verl.single_controller.base.worker_group import ResourcePool

READY_TIMEOUT_S = 300  # for the resources of each group to become free
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

    `max_colocate_count` worker groups may share the pool: each of their ranks takes 1 / `max_colocate_count` of its
    bundle. `detached`: the reservation outlives its creator. `accelerator_type`: the kind of GPU, by Ray's name.
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
        kind = {} if self.accelerator_type is None else {self.accelerator_type: 1e-4}  # a node of the kind has 1 of it
        return {"CPU": 1, "GPU": 1, **kind} if self.use_gpu else {"CPU": 1}

    def get_placement_groups(  # device_name: for verl's callers
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """The ready groups and, in `store`, their sizes, by their nodes' addresses; reserved on the first call."""
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
        self.store = [group.bundle_count for group in self.pgs]
        return self.pgs

    def _wait_until_ready(self, groups: list[PlacementGroup]) -> None:
        need = {key: value * self.world_size for key, value in self._bundle().items()}
        total = ray.cluster_resources()
        too_small = any(total.get(key, 0) < value for key, value in need.items())
        for group in groups:
            if not group.wait(HOPELESS_TIMEOUT_S if too_small else READY_TIMEOUT_S):
                free = {key: ray.available_resources().get(key, 0) for key in need}
                owned = {key: total.get(key, 0) for key in need}
                raise RuntimeError(
                    f"resource pool {self.store} needs {need} in bundles of one node each; the Ray cluster has {owned} "
                    f"in all and {free} free. Lower n_gpus_per_node or nnodes of trainer "
                    "(of reward_model or rollout if the pool is theirs), or add nodes"
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
    """`subgroup_world_size` bundles of a reserved pool from `start_bundle_index` on, counted over all groups."""

    def __init__(
        self, placement_groups: list[PlacementGroup], start_bundle_index: int, subgroup_world_size: int, **kwargs
    ) -> None:
        flat = [(group, i) for group in placement_groups for i in range(group.bundle_count)]
        self._own = flat[start_bundle_index : start_bundle_index + subgroup_world_size]
        if len(self._own) != subgroup_world_size:
            last = start_bundle_index + subgroup_world_size - 1
            raise ValueError(f"bundles {start_bundle_index}..{last} are requested; the pool has {len(flat)}")
        super().__init__(**kwargs)
        self.store = [len(list(rows)) for _, rows in groupby(self._own, lambda bundle: bundle[0])]
        self.pgs = placement_groups
        self.start_bundle_index, self.subgroup_world_size = start_bundle_index, subgroup_world_size

    def bundles(self, strategy: str, device_name: str) -> list[tuple[PlacementGroup, int, int, int]]:
        slots = zip(self._own, self.local_rank_list(), self.local_world_size_list(), strict=True)
        return [(group, bundle, local, count) for (group, bundle), local, count in slots]

    def release(self) -> None:
        raise ValueError(f"pool {self.name_prefix!r} is a part of another one, which owns the resources; release that")


def split_resource_pool(
    resource_pool: RayResourcePool | SubRayResourcePool, split_size: int | list[int]
) -> list[SubRayResourcePool]:
    """Sub-pools of the given sizes, or of `split_size` ranks each; the sizes must add up to the pool."""
    total = resource_pool.world_size
    sizes = [split_size] * (total // max(1, split_size)) if isinstance(split_size, int) else split_size
    if sum(sizes) != total or min(sizes, default=0) < 1:
        what = f"split_size={split_size}: such parts do not add up to the pool's {total} ranks"
        raise ValueError(f"{what}; give a divisor of {total}, or a list of sizes with this sum")
    start = resource_pool.start_bundle_index if isinstance(resource_pool, SubRayResourcePool) else 0
    shared = {"use_gpu": resource_pool.use_gpu, "max_colocate_count": resource_pool.max_colocate_count}
    groups, parts = resource_pool.get_placement_groups(), []
    for number, size in enumerate(sizes):
        prefix = f"{resource_pool.name_prefix}_split_{number}"
        first = start + sum(sizes[:number])
        parts.append(SubRayResourcePool(groups, first, size, name_prefix=prefix, **shared))
    return parts


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """One pool with the nodes of both, whose placement groups it shares: release it, or both of them, not all."""
    if isinstance(rp1, SubRayResourcePool) or isinstance(rp2, SubRayResourcePool):
        raise ValueError("a part of a split pool cannot be merged; merge whole pools, then split")
    for name in ("use_gpu", "max_colocate_count", "accelerator_type", "detached"):
        if getattr(rp1, name) != getattr(rp2, name):
            raise ValueError(f"pools with {name}={getattr(rp1, name)} and {getattr(rp2, name)} cannot be merged")
    prefix = f"{rp1.name_prefix}_{rp2.name_prefix}"
    groups = rp1.get_placement_groups() + rp2.get_placement_groups()
    merged = RayResourcePool(rp1.store + rp2.store, rp1.use_gpu, prefix, rp1.max_colocate_count, rp1.detached)
    merged.pgs, merged.accelerator_type = groups, rp1.accelerator_type
    return merged
