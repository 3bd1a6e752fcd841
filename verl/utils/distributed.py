"""Starting and ending the process group of a rank."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from loguru import logger

from verl.utils.accelerator import get_device_name, get_nccl_backend, rank_device_index, threads_of_rank

HOST_TIMEOUT = timedelta(hours=10)  # of collectives on the host next to a group of GPUs


def set_numa_affinity() -> None:
    """Keep this process on the cores next to its GPU; without a GPU, or where the system does not say, leave it."""
    if get_device_name() != "cuda":
        return
    p = torch.cuda.get_device_properties(torch.cuda.current_device())
    address = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
    listing = Path("/sys/bus/pci/devices") / address / "local_cpulist"
    if not listing.is_file():
        logger.debug(f"no NUMA information for GPU {address}; affinity unchanged")
        return
    ranges = [part.split("-") for part in listing.read_text().strip().split(",") if part]
    allowed = os.sched_getaffinity(0) & {core for r in ranges for core in range(int(r[0]), int(r[-1]) + 1)}
    if allowed:
        os.sched_setaffinity(0, allowed)


def _start(timeout_second: float | None) -> None:
    missing = [k for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if k not in os.environ]
    if missing:
        raise RuntimeError(f"environment lacks {', '.join(missing)}; start this process with torchrun or a WorkerGroup")
    backend = "gloo" if get_nccl_backend() == "gloo" else "cpu:gloo,cuda:nccl"
    timeout = None if timeout_second is None else timedelta(seconds=timeout_second)
    dist.init_process_group(backend, timeout=timeout)
    if backend != "gloo":
        # The limit is for collectives on GPUs: on the host ranks wait while the first one writes a checkpoint.
        dist.group.WORLD._get_backend(torch.device("cpu")).set_timeout(HOST_TIMEOUT)


def initialize_global_process_group(timeout_second: float = 36000) -> tuple[int, int, int]:
    """Join the torchrun job; returns (local rank, rank, world size) and selects this rank's GPU."""
    local_rank, ranks = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if get_device_name() == "cuda":
        torch.cuda.set_device(rank_device_index())
    elif ranks > 1 and "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
        torch.set_num_threads(threads_of_rank(ranks))  # torchrun's own default for several ranks is one
    if not dist.is_initialized():
        _start(timeout_second)
    return local_rank, dist.get_rank(), dist.get_world_size()


def ensure_process_group(device_type: str) -> None:
    """A process alone gets a group of one; several must have been joined by their launcher."""
    if dist.is_initialized():
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            "WORLD_SIZE is above 1, but no process group exists: call torch.distributed.init_process_group (or "
            "verl.utils.distributed.initialize_global_process_group) before FSDPEngine.initialize()."
        )
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def host_barrier() -> None:
    """Wait for all ranks by gloo: the wait may be long, where NCCL would occupy the devices and time out."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))  # of a CPU tensor: every process group that verl starts has gloo for these


def shared_store() -> dist.Store:
    """Keys and counters that all ranks share, on a free port of rank 0, which must be at MASTER_ADDR; collective."""
    if dist.get_world_size() == 1:
        return dist.HashStore()
    first = dist.get_rank() == 0
    host = os.environ["MASTER_ADDR"]
    store = dist.TCPStore(host, 0, is_master=True) if first else None
    port = [store.port if first else None]
    dist.broadcast_object_list(port)
    return store or dist.TCPStore(host, port[0], is_master=False)


def destroy_global_process_group() -> None:
    """Leave the process group, if there is one, after every rank has come this far."""
    if dist.is_initialized():
        host_barrier()
        dist.destroy_process_group()


def initialize_global_process_group_ray(timeout_second: float | None = None) -> None:
    """Join the group whose address a WorkerGroup put into the environment; nothing to do when already in it."""
    if not dist.is_initialized():
        _start(timeout_second)
