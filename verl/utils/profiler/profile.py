"""Compatibility with verl: import path of `verl.profiling.profile`, and of the workers' part of it."""

from verl.profiling.profile import *  # noqa: F403
from verl.single_controller.base.profiling import DistProfilerExtension  # noqa: F401
