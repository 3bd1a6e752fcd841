"""Helpers without Ray or process groups; the three names that recipes import most are loaded on demand."""

import importlib

_HOME = {"hf_processor": "tokenizer", "hf_tokenizer": "tokenizer", "omega_conf_to_dataclass": "config"}


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"verl.utils.{_HOME[name]}"), name)
    raise AttributeError(f"module 'verl.utils' has no attribute {name!r}")
