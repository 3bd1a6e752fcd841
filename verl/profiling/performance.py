"""The memory of a rank, and timers of code blocks."""

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from loguru import logger as default_logger

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


def log_gpu_memory_usage(
    head: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, rank: int | None = 0
) -> None:
    """Log the memory of rank `rank` (None: of every rank) in GiB: of the GPU, or of the process without one."""
    if rank not in (None, dist.get_rank() if dist.is_initialized() else 0):
        return
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        parts = {"allocated": allocated, "reserved": reserved, "used": total - free, "total": total}
    else:
        parts = {"resident": psutil.Process().memory_info().rss, "total": psutil.virtual_memory().total}
    text = f"{head}, memory in GiB: {', '.join(f'{name} {size / GIB:.2f}' for name, size in parts.items())}"
    (logger or default_logger).log(level if logger else logging.getLevelName(level), text)


class GPUMemoryLogger:
    """Decorator: logs the memory before and after each call, with the role's name."""

    def __init__(
        self, role: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, log_only_rank_0: bool = True
    ) -> None:
        self.role, self.options = role, (logger, level, 0 if log_only_rank_0 else None)

    def __call__(self, decorated_function: Callable) -> Callable:
        @functools.wraps(decorated_function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.log(decorated_function, *args, **kwargs)

        return call

    def log(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call the function, with both log lines."""
        log_gpu_memory_usage(f"before {self.role} {func.__name__}", *self.options)
        output = func(*args, **kwargs)
        log_gpu_memory_usage(f"after {self.role} {func.__name__}", *self.options)
        return output
