"""Compatibility with verl: import path of settings, tools, timers and memory logs of `verl.profiling`.

Names are imported on first use: settings need no torch, and DistProfilerExtension is part of the single controller.
"""

import importlib
from typing import Any

_NAMES = {
    "verl.config.profiler": (
        "NsightToolConfig", "ProfilerConfig", "ToolConfigs", "TorchMemoryToolConfig", "TorchProfilerToolConfig",
    ),
    "verl.utils.profiler.performance": (
        "GPUMemoryLogger", "gather_timing", "log_gpu_memory_usage", "log_print", "marked_timer", "reduce_timing",
        "simple_timer", "topk_reduce_ratio_min_max",
    ),
    "verl.profiling.profile": (
        "DistProfiler", "Profiler", "TorchMemoryProfiler", "mark_annotate", "mark_end_range", "mark_start_range",
    ),
    "verl.single_controller.base.profiling": ("DistProfilerExtension",),
    "verl.utils.import_utils": ("is_nvtx_available",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
