"""Worker: one rank of a group, a process of a distributed job."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl.single_controller.base.dispatch import Dispatch, Execute, register
from verl.utils.ports import free_port

STACK_SIGNAL = signal.SIGUSR1  # a rank answers it with its Python stacks on standard error


def get_master_addr_port() -> tuple[str, str]:
    """Address of this node as Ray knows it (127.0.0.1 without Ray), with a port that is free now: a rendezvous."""
    import ray

    host = ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
    return host, str(free_port("::" if ":" in host else ""))


def ray_noset_visible_devices(env_vars: Mapping[str, str] = os.environ) -> bool:
    """True when Ray does not hide accelerators from its actors, so that each must select its own."""
    kinds = ("CUDA", "ROCR", "HIP", "ASCEND_RT")
    return any(env_vars.get(f"RAY_EXPERIMENTAL_NOSET_{kind}_VISIBLE_DEVICES") for kind in kinds)


class WorkerHelper:
    """What a worker can say about its node."""

    def get_available_master_addr_port(self) -> tuple[str, str]:
        return get_master_addr_port()

    get_availale_master_addr_port = get_available_master_addr_port  # older spelling, kept for callers


@dataclass
class DistRankInfo:
    """A rank's place in Megatron's parallel groups; FSDP2 has data parallel ranks only."""

    tp_rank: int
    dp_rank: int
    pp_rank: int
    cp_rank: int


@dataclass
class DistGlobalInfo:
    """The sizes of those groups."""

    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int


class Worker(WorkerHelper):
    """Base of every role. Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

    A subclass calls `super().__init__()` first. Roles that share a process each keep their own dispatch tables;
    `fused_worker_dict` names the roles of a fused process.
    """

    fused_worker_attr_name = "fused_worker_dict"

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        if cuda_visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(cuda_visible_devices)
        missing = [key for key in ("WORLD_SIZE", "RANK") if key not in os.environ]
        if missing:
            raise RuntimeError(f"{type(self).__name__} needs {', '.join(missing)}: start it through a RayWorkerGroup")
        self._choose_device()
        if threading.current_thread() is threading.main_thread():
            faulthandler.register(STACK_SIGNAL, all_threads=True)
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.rank = int(os.environ["RANK"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.fused_worker_dict: dict[str, Worker] = {}
        self._dispatch_dp_rank: dict[str, int] = {}
        self._collect_dp_rank: dict[str, bool] = {}

    @classmethod
    def env_keys(cls) -> list[str]:
        """Environment variables that place a rank in its world."""
        names = ["WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"]
        return [*names, "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"]

    def _choose_device(self) -> None:
        """Make LOCAL_RANK the index of this rank's own GPU, whether Ray hides the others or not."""
        if os.environ.get("WG_BACKEND") != "ray":
            return
        import ray

        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = shown.split(",") if shown else []
        if ray_noset_visible_devices():
            ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
            if ids and (not visible or ids[0] in visible):
                os.environ["LOCAL_RANK"] = str(visible.index(ids[0])) if visible else ids[0]
            elif visible:
                os.environ["LOCAL_RANK"] = "0"
        elif len(visible) == 1:
            os.environ["LOCAL_RANK"] = "0"

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Set which part of a batch this rank takes in `mesh_name`, and whether its output is collected.

        AssertionError if the mesh is registered with other values.
        """
        new = (int(dp_rank), bool(is_collect))
        ranks, collects = self._dispatch_dp_rank, self._collect_dp_rank
        known = (ranks.setdefault(mesh_name, new[0]), collects.setdefault(mesh_name, new[1]))
        if known != new:
            raise AssertionError(
                f"mesh {mesh_name!r} is registered on rank {self.rank} with (dp_rank, is_collect) {known}, not {new}"
            )

    def _known_mesh(self, mesh_name: str) -> str:
        if mesh_name not in self._dispatch_dp_rank:
            raise KeyError(
                f"{type(self).__name__} has no mesh {mesh_name!r} (it has {sorted(self._dispatch_dp_rank)}); call "
                f"_register_dispatch_collect_info in its init_model"
            )
        return mesh_name

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        return self._dispatch_dp_rank[self._known_mesh(mesh_name)]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def query_collect_info(self, mesh_name: str) -> bool:
        """True when this rank's output in `mesh_name` is collected."""
        return self._collect_dp_rank[self._known_mesh(mesh_name)]

    def get_dispatch_collect(self) -> dict[str, dict]:
        """Both tables, to hand to another worker of the same process."""
        return {"dispatch_dp_rank": dict(self._dispatch_dp_rank), "collect_dp_rank": dict(self._collect_dp_rank)}

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: dict[str, int], collect_dp_rank: dict[str, bool]
    ) -> None:
        """Take over one mesh from another worker's tables; of tables without that name the last entry."""
        tables = (dispatch_dp_rank, collect_dp_rank)
        rank, is_collect = (t[mesh_name] if mesh_name in t else [*t.values()][-1] for t in tables)
        self._register_dispatch_collect_info(mesh_name, rank, is_collect)

    def get_fused_worker_by_name(self, worker_name: str) -> Worker | None:
        """The role of that name in this process, if there is one."""
        return self.fused_worker_dict.get(worker_name)

    def get_master_addr_port(self) -> tuple[str | None, str | None]:
        return os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")

    def get_node_id(self) -> str:
        """Ray's id of the node this rank runs on."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def get_cuda_visible_devices(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable, *args, **kwargs) -> Any:
        """Run func(self, ...) on every rank with its part of each DataProto."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable, *args, **kwargs) -> Any:
        """Run func(...) on rank 0."""
        return func(*args, **kwargs)
