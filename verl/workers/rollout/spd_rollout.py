"""Compatibility with verl: import path of `recipe.spd.rollout.spd_rollout`, imported when a name is used."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    name = "CompletionClient" if name == "VllmEngineServer" else name
    return getattr(importlib.import_module("recipe.spd.rollout.spd_rollout"), name)
