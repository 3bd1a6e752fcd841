"""Import path of the SPD reward, which lives in `recipe.spd.reward`; nothing is imported before it is used."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("recipe.spd.reward"), name)
