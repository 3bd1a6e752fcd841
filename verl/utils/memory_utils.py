"""Compatibility with verl: memory of the CUDA device; without one, nothing is measured."""

import gc
import os
import time
from typing import Any

import torch
from loguru import logger

from verl.profiling.performance import GIB


def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 3) -> None:
    """Collect garbage and return cached CUDA memory, again while that frees more than 1 GiB."""
    for _ in range(max_retries):
        before = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
        gc.collect()
        if not before:
            return
        torch.cuda.empty_cache()
        if force_sync:
            torch.cuda.synchronize()
        if before - torch.cuda.memory_reserved() < GIB:
            return


def reset_memory_stats() -> None:
    """Let peaks be measured from now on."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def get_memory_info() -> dict[str, Any]:
    """GiB of this rank's CUDA device and its number; empty without one."""
    if not torch.cuda.is_available():
        return {}
    device = torch.cuda.current_device()
    sizes = {
        "total_memory": torch.cuda.get_device_properties(device).total_memory,
        "reserved_memory": torch.cuda.memory_reserved(), "allocated_memory": torch.cuda.memory_allocated(),
    }  # fmt: skip
    sizes["cached_memory"] = sizes["reserved_memory"] - sizes["allocated_memory"]
    return {**{f"{name}_gb": size / GIB for name, size in sizes.items()}, "device_id": device}


def log_memory_usage(stage: str = "current") -> None:
    """Log `get_memory_info`."""
    if info := get_memory_info():
        logger.info("memory {}: {}", stage, ", ".join(f"{name} {value:.2f}" for name, value in info.items()))


def optimize_memory_for_inference() -> None:
    """Free what the caching allocator holds, and let it use all of the device."""
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)
    aggressive_empty_cache()


def optimize_memory_for_training() -> None:
    """Free what the caching allocator holds."""
    aggressive_empty_cache(force_sync=False)


def enable_memory_visualize(
    trace_alloc_max_entries: int = 200_000, stack_depth: int = 32, context: str = "all", stacks: str = "all",
    devices: Any = None, record_context: bool = True,
) -> None:
    """Record CUDA allocations with their stacks, for `MemorySnapshotSampler`; nothing without CUDA.

    `devices` has no effect: PyTorch records all devices of the process.
    """
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(
            context=context if record_context else None, stacks=stacks, max_entries=trace_alloc_max_entries
        )


class MemorySnapshotSampler:
    """Writes snapshots of the CUDA allocations that `enable_memory_visualize` records."""

    def __init__(self, out_dir: str = "./mem_snapshots", tag: str = "periodic") -> None:
        self.out_dir, self.tag = out_dir, tag

    def dump_memory_snapshot(
        self, out_dir: str = "./mem_snapshots", tag: str = "snapshot", sub_dir: str | None = None
    ) -> str | None:
        """Path of a new snapshot, a file for pytorch.org/memory_viz; None without CUDA."""
        if not torch.cuda.is_available():
            return None
        folder = os.path.join(out_dir, sub_dir) if sub_dir else out_dir
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"{tag}_rank{os.environ.get('RANK', '0')}_{time.time_ns()}.pickle")
        torch.cuda.memory._dump_snapshot(path)
        return path
