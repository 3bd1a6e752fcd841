"""Compatibility with verl: import path of `recipe.spd.data.dataset`, which is imported when a name is used."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("recipe.spd.data.dataset"), name)
