"""Compatibility with verl: names that recipes import from `verl.utils` itself, loaded on first use."""

import importlib

_HOME = {
    "as_torch_index": "groupwise", "group_mean_std": "groupwise", "hf_processor": "tokenizer",
    "hf_tokenizer": "tokenizer", "omega_conf_to_dataclass": "config", "validate_config": "config",
}  # fmt: skip


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"verl.utils.{_HOME[name]}"), name)
    raise AttributeError(f"module 'verl.utils' has no attribute {name!r}")
