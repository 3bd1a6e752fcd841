"""Compatibility with verl: import path of `verl.profiling.profile`, and of the workers' part of it."""

from verl.profiling.profile import (
    DistProfiler,
    NsightProfiler,
    Profiler,
    TorchMemoryProfiler,
    mark_annotate,
    mark_end_range,
    mark_start_range,
)
from verl.single_controller.base.profiling import DistProfilerExtension

__all__ = [
    "DistProfiler", "DistProfilerExtension", "NsightProfiler", "Profiler", "TorchMemoryProfiler", "mark_annotate",
    "mark_end_range", "mark_start_range",
]  # fmt: skip
