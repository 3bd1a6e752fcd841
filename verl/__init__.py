"""The verl package: DataProto is its one top-level name, loaded when first used."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.protocol import DataProto

__version__ = "0.7.0+spd.0.1.0"
__all__ = ["DataProto", "__version__"]


def __getattr__(name: str):
    if name == "DataProto":
        return importlib.import_module("verl.protocol").DataProto
    raise AttributeError(f"module 'verl' has no attribute {name!r}")


importlib.import_module("verl.compat").install()
for _module in filter(None, (m.strip() for m in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","))):
    importlib.import_module(_module)
