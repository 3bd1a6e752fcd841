"""RayWorkerGroup: starts one Ray actor per rank and turns calls on the group into calls on the ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray
from loguru import logger
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import TensorDict

from verl.protocol import DataProto
from verl.single_controller.base.worker import get_master_addr_port
from verl.single_controller.base.worker_group import WorkerGroup, func_generator, registered_methods
from verl.single_controller.ray.fetch import failure_of
from verl.single_controller.ray.ray_class import FUSED_SEPARATOR, RayClassWithInitArgs, role_classes, unwrap
from verl.single_controller.ray.resource_pool import RayResourcePool, get_random_string, node_of_bundle
from verl.single_controller.ray.watchdog import phase_of, timeout_error
from verl.utils.accelerator import threads_of_rank


def _master_address_near(group: PlacementGroup, bundle: int) -> tuple[str, str]:
    """Rendezvous address on the node of rank 0; asked there unless that is this node."""
    node = node_of_bundle(group, bundle)
    if node == ray.get_runtime_context().get_node_id():
        return get_master_addr_port()
    there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return ray.get(ray.remote(num_cpus=0)(get_master_addr_port).options(scheduling_strategy=there).remote())


class RayWorkerGroup(WorkerGroup):
    """One actor per bundle of a resource pool, or actors that exist already (`worker_names`, `worker_handles`)."""

    def __init__(
        self, resource_pool: RayResourcePool | None = None, ray_cls_with_init: RayClassWithInitArgs | None = None,
        bin_pack: bool = True, name_prefix: str | None = None, detached: bool = False,
        worker_names: list[str] | None = None, worker_handles: list[ActorHandle] | None = None,
        ray_wait_register_center_timeout: int = 300, device_name: str = "cuda",
        worker_env: dict[str, str] | None = None, time_limits: Mapping[str, float | None] | None = None,
        nsight_options: dict[str, str] | None = None, **kwargs
    ) -> None:
        super().__init__(resource_pool=resource_pool, **kwargs)
        self.time_limits = dict(time_limits or {})  # seconds by phase of the watchdog, None for no limit
        self.ray_cls_with_init = ray_cls_with_init
        self.name_prefix = get_random_string(length=6) if name_prefix is None else name_prefix
        self.resource_pool = resource_pool
        self.device_name = device_name
        self.customized_worker_env = dict(worker_env or {})
        self.nsight_options = nsight_options  # of `nsys profile` around each rank; None: ranks start without it
        self.fused_worker_used = ray_cls_with_init is not None and ray_cls_with_init.fused_worker_used
        self.sub_cls_name = ""
        self.wg_dict: dict[str, RayWorkerGroup] = {}
        if worker_handles is not None or worker_names is not None:
            self._workers = list(worker_handles or [ray.get_actor(name) for name in worker_names])
            self._worker_names = list(worker_names or [f"worker {i}" for i in range(len(self._workers))])
        elif resource_pool is None or ray_cls_with_init is None:
            raise ValueError("a RayWorkerGroup needs a resource pool and a class, or the workers' names or handles")
        else:
            self._start_workers("STRICT_PACK" if bin_pack else "PACK", detached)
        self.method_names: list[str] = []
        if ray_cls_with_init is not None:
            self.method_names = self._bind_worker_method(unwrap(ray_cls_with_init.cls), func_generator)

    def _start_workers(self, strategy: str, detached: bool) -> None:
        pool, cls = self.resource_pool, self.ray_cls_with_init
        slots = pool.bundles(strategy, self.device_name)
        share = round(1 / pool.max_colocate_count - 5e-5, 4)  # rounded down: all shares must fit into the bundle
        self.master_address, self.master_port = _master_address_near(slots[0][0], slots[0][1])
        label = unwrap(cls.cls).__name__
        for rank, (group, bundle, local_rank, local_world) in enumerate(slots):
            name = f"{self.name_prefix}{label}_{rank}:{local_rank}"
            environment = self._rank_environment(rank, len(slots), local_rank, local_world)
            lifetime = {"lifetime": "detached"} if detached else {}
            runtime: dict[str, Any] = {"env_vars": environment}
            if self.nsight_options is not None:
                runtime["nsight"] = self.nsight_options
            cls.update_options({"name": name, "num_cpus": share, "runtime_env": runtime, **lifetime})
            self._workers.append(cls(group, bundle, pool.use_gpu, num_gpus=share, device_name=self.device_name))
            self._worker_names.append(name)

    def _rank_environment(self, rank: int, world: int, local_rank: int, local_world: int) -> dict[str, str]:
        env = {
            "WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_world), "RAY_LOCAL_RANK": str(local_rank),
            "RAY_LOCAL_WORLD_SIZE": str(local_world), "MASTER_ADDR": str(self.master_address),
            "MASTER_PORT": str(self.master_port), "WG_PREFIX": self.name_prefix, "WG_BACKEND": "ray",
        }
        if not self.resource_pool.use_gpu:  # Ray would give them one thread
            env["OMP_NUM_THREADS"] = str(threads_of_rank(local_world))
            env.update({k: os.environ[k] for k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if k in os.environ})
            env["CUDA_VISIBLE_DEVICES"] = ""
        if taken := sorted(env.keys() & self.customized_worker_env.keys()):
            raise ValueError(f"worker_env sets {', '.join(taken)}, which the group sets for each rank; remove it")
        return {**env, **self.customized_worker_env}

    def shutdown(self) -> None:
        """End the ranks. Groups that were spawned from this one end with it; the resources stay reserved."""
        for worker in self._workers:
            ray.kill(worker)

    def _is_worker_alive(self, worker: ActorHandle) -> bool:
        from ray._private.state import state

        return state.actor_table(worker._actor_id.hex()).get("State") != "DEAD"

    @classmethod
    def from_detached(
        cls, name_prefix: str | None = None, worker_names: list[str] | None = None,
        worker_handles: list[ActorHandle] | None = None, ray_cls_with_init: RayClassWithInitArgs | None = None,
        **kwargs
    ) -> RayWorkerGroup:
        """A group over actors that run already."""
        handles = {"worker_names": worker_names, "worker_handles": worker_handles}
        return cls(None, ray_cls_with_init, name_prefix=name_prefix, **handles, **kwargs)

    def spawn(self, prefix_set: set[str]) -> dict[str, RayWorkerGroup]:
        """One group per role of a colocated class, over the same processes: `<role>_<method>` becomes `<method>`."""
        separator = FUSED_SEPARATOR if self.fused_worker_used else "_"
        return {role: self._group_of_role(role, prefix=role + separator) for role in prefix_set}

    spawn_fused = spawn

    def _group_of_role(self, role: str, prefix: str) -> RayWorkerGroup:
        roles = role_classes(self.ray_cls_with_init)
        if role not in roles:
            raise ValueError(f"this group has no role {role!r}; it has {', '.join(sorted(roles))}")
        group = type(self).from_detached(
            self.name_prefix, self._worker_names, self._workers, device_name=self.device_name
        )
        group.resource_pool = self.resource_pool
        group.master_address, group.master_port = self.master_address, self.master_port
        group.sub_cls_name, group.fused_worker_used = role, self.fused_worker_used
        group.time_limits = self.time_limits
        for name, attrs in registered_methods(roles[role]).items():
            group._bind_method(prefix + name, attrs, func_generator, as_name=name)
            group.method_names.append(name)
        return group

    def fuse(self, prefix_set: set[str]) -> None:
        """Make every role's group an attribute of this one."""
        self.wg_dict = self.spawn(prefix_set)
        for role, group in self.wg_dict.items():
            setattr(self, role, group)

    def _call(
        self, rank: int, method_name: str, args: tuple, kwargs: dict, stored: dict[int, ray.ObjectRef]
    ) -> ray.ObjectRef:
        """Call a rank with a reference for each batch, kept in `stored`: ranks that share a part share its memory."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, DataProto | TensorDict) and id(value) not in stored:
                stored[id(value)] = ray.put(value)
        args, kwargs = [stored.get(id(a), a) for a in args], {k: stored.get(id(v), v) for k, v in kwargs.items()}
        worker = self._workers[rank]
        if self.fused_worker_used and FUSED_SEPARATOR in method_name:
            return worker._fuw_execute.remote(method_name, *args, **kwargs)
        return getattr(worker, method_name).remote(*args, **kwargs)

    def _fetch(self, refs: ray.ObjectRef | list[ray.ObjectRef], method_name: str) -> Any:
        many = refs if isinstance(refs, list) else [refs]
        labels = list(self.actors_by_label())[: len(many)]
        limit = self.time_limits.get(phase_of(method_name))
        try:
            values = ray.get(many, timeout=limit)
        except GetTimeoutError:
            raise timeout_error(many, labels, method_name, limit, self._workers) from None
        except (RayTaskError, RayActorError):
            raise failure_of(many, labels, method_name) from None
        return values if isinstance(refs, list) else values[0]

    def actors_by_label(self) -> dict[str, ActorHandle]:
        """The ranks' actors by the names that error messages use, in rank order."""
        what = f"role {self.sub_cls_name!r}" if self.sub_cls_name else "worker group"
        actors = zip(self._worker_names, self._workers, strict=True)
        return {f"{what}, rank {rank} ({name})": actor for rank, (name, actor) in enumerate(actors)}

    def execute_rank_zero_async(self, method_name: str, *args, **kwargs) -> ray.ObjectRef:
        """Call rank 0 with the arguments as they are; a reference."""
        return self._call(0, method_name, args, kwargs, {})

    execute_rank_zero = execute_rank_zero_async

    def execute_rank_zero_sync(self, method_name: str, *args, **kwargs) -> Any:
        """Call rank 0 and wait for its output."""
        return self._fetch(self.execute_rank_zero_async(method_name, *args, **kwargs), method_name)

    def execute_all_async(self, method_name: str, *args, **kwargs) -> list[ray.ObjectRef]:
        """Call every rank; references in rank order.

        When every argument is a list with one entry per rank, each rank gets its entry; else all get all arguments.
        """
        ranks = range(len(self._workers))
        values = [*args, *kwargs.values()]
        sharded = bool(values) and all(isinstance(v, list) and len(v) == len(ranks) for v in values)
        shares = [(args, kwargs) for _ in ranks]
        if sharded:
            shares = [(tuple(a[rank] for a in args), {k: v[rank] for k, v in kwargs.items()}) for rank in ranks]
        stored: dict[int, ray.ObjectRef] = {}
        return [self._call(rank, method_name, *share, stored) for rank, share in enumerate(shares)]

    execute_all = execute_all_async

    def try_execute_all(self, method_name: str, timeout_s: float) -> None:
        """Call every rank; errors, and ranks that do not answer within `timeout_s` seconds, are logged."""
        separator = FUSED_SEPARATOR if self.fused_worker_used else "_"
        prefix = f"{self.sub_cls_name}{separator}" if self.sub_cls_name else ""
        calls = self.execute_all_async(prefix + method_name)
        done, hanging_calls = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
        for ref in done:
            try:
                ray.get(ref)
            except RayError as e:
                logger.warning(f"{method_name} failed on a rank: {str(e).strip().splitlines()[-1]}")
        if hanging_calls:
            logger.warning(f"{method_name}: {len(hanging_calls)} of {len(calls)} ranks did not finish in {timeout_s} s")

    def execute_all_sync(self, method_name: str, *args, **kwargs) -> list[Any]:
        """Call every rank and wait for the outputs, in rank order."""
        return self._fetch(self.execute_all_async(method_name, *args, **kwargs), method_name)

    @property
    def worker_names(self) -> list[str]:
        return self._worker_names
