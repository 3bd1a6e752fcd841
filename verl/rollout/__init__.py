"""Rollouts: engines that turn prompts into answers."""

import importlib
from typing import Any

__all__ = ["BaseRollout", "get_rollout_class", "register_rollout"]  # noqa: F822


def __getattr__(name: str) -> Any:
    """The interface is loaded when asked for: what a driver needs of this package does without DataProto's packages."""
    if name in __all__:
        return getattr(importlib.import_module("verl.rollout.base"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
