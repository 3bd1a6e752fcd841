"""The peak memory of a rank, and timers of code blocks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from verl.profiling.profile import marked_range

GIB = 2**30


def peak_memory(device_type: str) -> dict[str, float]:
    """Metrics of the most memory that this rank has had so far, GiB: of its GPU, or of its process on a CPU."""
    if device_type == "cuda":
        sizes = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    else:  # not getrusage, whose maximum a process takes over from the one that started it
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        sizes = {"resident": int(status.partition("VmHWM:")[2].split()[0]) << 10}
    return {f"perf/max_memory_{name}_gb": size / GIB for name, size in sizes.items()}


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Add the seconds of the block to `timing_raw[name]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start


@contextmanager
def marked_timer(
    name: str, timing_raw: dict[str, float], color: str | None = None, domain: str | None = None,
    category: str | None = None,
) -> Iterator[None]:
    """As `simple_timer`, and a range of that name in the profile."""
    with marked_range(name), simple_timer(name, timing_raw):
        yield
