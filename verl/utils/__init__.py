"""Helpers without Ray or process groups; the three names recipes import most are at hand here, loaded when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.tokenizer import hf_processor, hf_tokenizer

__all__ = ["hf_processor", "hf_tokenizer", "omega_conf_to_dataclass"]

_HOME = {
    "hf_processor": "verl.utils.tokenizer",
    "hf_tokenizer": "verl.utils.tokenizer",
    "omega_conf_to_dataclass": "verl.utils.config",
}


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'verl.utils' has no attribute {name!r}")
