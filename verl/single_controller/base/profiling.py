"""What lets a trainer start and stop the profilers of its ranks."""

from typing import Any

from verl.profiling.profile import DistProfiler
from verl.single_controller.base.dispatch import Dispatch, register


class DistProfilerExtension:
    """Mixin of a worker: its group can start and stop the worker's profiler."""

    def __init__(self, profiler: DistProfiler) -> None:
        self.profiler = profiler

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, **kwargs: Any) -> None:
        """Begin to record on the ranks that the role's profiler settings name; `step` names the files."""
        self.profiler.start(**kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> None:
        """End the recording and write it."""
        self.profiler.stop()
