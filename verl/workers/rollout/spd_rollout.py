"""Import path of the SPD recipe's rollout; importing it registers the rollout under `rollout.name=spd`."""

import importlib
from typing import Any

_rollout = importlib.import_module("recipe.spd.rollout")


def __getattr__(name: str) -> Any:
    return getattr(_rollout, name)
