"""Compatibility with verl: the older path of `verl.utils.profiler`, the same names, imported on first use."""

from typing import Any

from verl.utils import profiler

__all__ = list(profiler.__all__)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(profiler, name)
