"""Compatibility with verl: import path of settings, tools, timers and memory logs of `verl.profiling`."""

from verl.config.profiler import *  # noqa: F403
from verl.profiling.profile import *  # noqa: F403
from verl.single_controller.base.profiling import DistProfilerExtension  # noqa: F401
from verl.utils.import_utils import is_nvtx_available  # noqa: F401
from verl.utils.profiler.performance import *  # noqa: F403
