"""Import path of the SPD data set, which lives in `recipe.spd.dataset`; nothing is imported before it is used."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("recipe.spd.dataset"), name)
