"""Upstream's path of the timers, memory logs and ranges of verl.utils.profiler."""

from verl.utils.profiler import (
    GPUMemoryLogger,
    log_gpu_memory_usage,
    log_print,
    mark_annotate,
    mark_end_range,
    mark_start_range,
    marked_timer,
    simple_timer,
)

__all__ = [
    "GPUMemoryLogger", "log_gpu_memory_usage", "log_print", "mark_annotate", "mark_end_range", "mark_start_range",
    "marked_timer", "simple_timer",
]  # fmt: skip
