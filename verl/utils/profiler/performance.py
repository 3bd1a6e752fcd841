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


def log_print(ctn: Any) -> None:
    """Log a value with the time."""
    default_logger.info("{}", ctn)


def _of_all_ranks(values: list[float]) -> torch.Tensor:
    """[ranks, values] float64."""
    ranks: list[Any] = [values]
    if dist.is_initialized():
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, values)
    return torch.tensor(ranks, dtype=torch.float64)


def reduce_timing(
    timing_raw: dict[str, float], reduce_op: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG
) -> dict[str, float]:
    """Each name's seconds over the ranks: their mean, or by ReduceOp SUM, MIN or MAX. The ranks have the same names."""
    names = sorted(timing_raw)
    seconds = _of_all_ranks([timing_raw[name] for name in names])
    reduce = {dist.ReduceOp.AVG: "mean", dist.ReduceOp.SUM: "sum", dist.ReduceOp.MIN: "amin", dist.ReduceOp.MAX: "amax"}
    if reduce_op not in reduce:
        raise ValueError(f"reduce_op={reduce_op} is unknown. Known: AVG, SUM, MIN, MAX.")
    return dict(zip(names, getattr(seconds, reduce[reduce_op])(0).tolist(), strict=True))


def gather_timing(timing_raw: dict[str, float]) -> dict[str, list[float]]:
    """Each name's seconds on every rank, in rank order."""
    names = sorted(timing_raw)
    return dict(zip(names, _of_all_ranks([timing_raw[name] for name in names]).T.tolist(), strict=True))


def topk_reduce_ratio_min_max(timing: float, k: int = 10) -> tuple[float, float, float]:
    """(share of the ranks whose seconds are above the (100 - k)th percentile, least, most seconds of a rank)."""
    seconds = _of_all_ranks([timing])[:, 0]
    above = seconds > torch.quantile(seconds, 1 - k / 100)
    return above.double().mean().item(), seconds.min().item(), seconds.max().item()
