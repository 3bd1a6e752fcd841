"""Compatibility with verl: helpers over dicts, namespaces and environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from verl.protocol.merge import deep_equal
from verl.single_controller.base.dispatch import DynamicEnum, DynamicEnumMeta  # noqa: F401
from verl.utils.time_limit import timeout_limit  # noqa: F401


def union_two_dict(dict1: dict, dict2: dict) -> dict:
    """Add the keys of `dict2` to `dict1`, in place; a shared key must hold equal values (AssertionError)."""
    for key, value in dict2.items():
        if key in dict1 and not deep_equal(dict1[key], value):
            raise AssertionError(f"key {key!r} has two values: {dict1[key]!r} and {value!r}; rename one of them")
        dict1[key] = value
    return dict1


def rename_dict(data: dict, prefix: str = "") -> dict:
    """A new dict whose keys are `prefix/key`."""
    start = prefix if not prefix or prefix.endswith("/") else prefix + "/"
    return {start + key: value for key, value in data.items()}


def append_to_dict(data: dict, new_data: dict, prefix: str = "") -> None:
    """Append every value of `new_data` to the list at `prefix + key` in `data`, in place."""
    for key, value in new_data.items():
        data.setdefault(prefix + key, []).append(value)


class NestedNamespace(SimpleNamespace):
    """A namespace made of a dict, dicts inside it becoming namespaces too."""

    def __init__(self, dictionary: dict, **kwargs):
        super().__init__(**kwargs)
        self.__dict__.update({k: NestedNamespace(v) if isinstance(v, dict) else v for k, v in dictionary.items()})


@contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """Set an environment variable inside the block; its old value, or absence, comes back afterwards."""
    previous = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if previous is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = previous


def convert_to_regular_types(obj: Any) -> Any:
    """Turn omegaconf containers, at any depth, into plain dicts and lists."""
    from omegaconf import DictConfig, ListConfig

    if isinstance(obj, ListConfig | list | tuple):
        return [convert_to_regular_types(item) for item in obj]
    if isinstance(obj, DictConfig | dict):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    return obj
