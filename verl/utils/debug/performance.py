"""Compatibility with verl: the older import path of `verl.utils.profiler.performance`."""

from verl.utils.profiler.performance import (
    GPUMemoryLogger,
    gather_timing,
    log_gpu_memory_usage,
    log_print,
    marked_timer,
    reduce_timing,
    simple_timer,
    topk_reduce_ratio_min_max,
)

__all__ = [
    "GPUMemoryLogger", "gather_timing", "log_gpu_memory_usage", "log_print", "marked_timer", "reduce_timing",
    "simple_timer", "topk_reduce_ratio_min_max",
]  # fmt: skip
