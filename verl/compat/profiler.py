"""Compatibility with verl: timers of code blocks, their statistics over ranks, and logs of memory use."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from loguru import logger as default_logger

from verl.profiling.performance import GIB, marked_timer, simple_timer  # noqa: F401


def _report(text: str, logger: Any, level: int) -> None:
    if logger is None:
        default_logger.log(logging.getLevelName(level), text)
    else:
        logger.log(level, text)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def log_gpu_memory_usage(
    head: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, rank: int | None = 0
) -> None:
    """Log the memory of rank `rank` (None: of every rank) in GiB: of the GPU, or of the process without one."""
    if rank is not None and _rank() != rank:
        return
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        parts = {"allocated": allocated, "reserved": reserved, "used": total - free, "total": total}
    else:
        parts = {"resident": psutil.Process().memory_info().rss, "total": psutil.virtual_memory().total}
    text = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    _report(f"{head}, memory in GiB: {text}", logger, level)


class GPUMemoryLogger:
    """Decorator: logs the memory before and after each call, with the role's name."""

    def __init__(
        self, role: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, log_only_rank_0: bool = True
    ) -> None:
        self.role, self.logger, self.level = role, logger, level
        self.rank = 0 if log_only_rank_0 else None

    def __call__(self, decorated_function: Callable) -> Callable:
        @functools.wraps(decorated_function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.log(decorated_function, *args, **kwargs)

        return call

    def log(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call the function, with both log lines."""
        name = f"{self.role} {func.__name__}"
        log_gpu_memory_usage(f"before {name}", self.logger, self.level, self.rank)
        output = func(*args, **kwargs)
        log_gpu_memory_usage(f"after {name}", self.logger, self.level, self.rank)
        return output
