"""Compatibility with verl: import path of `recipe.spd.rollout`."""

import importlib
from typing import Any

_rollout = importlib.import_module("recipe.spd.rollout")


def __getattr__(name: str) -> Any:
    return getattr(_rollout, name)
