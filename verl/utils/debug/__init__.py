"""Compatibility with verl: the older path of `verl.utils.profiler`, the same names, imported on first use."""

from verl.utils.profiler import __all__, __getattr__  # noqa: F401
