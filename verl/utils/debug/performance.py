"""Upstream's older path of verl.utils.profiler.performance."""

from verl.utils.profiler.performance import GPUMemoryLogger, log_gpu_memory_usage, log_print, marked_timer, simple_timer

__all__ = ["GPUMemoryLogger", "log_gpu_memory_usage", "log_print", "marked_timer", "simple_timer"]
