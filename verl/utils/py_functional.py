"""Helpers over plain Python values: dicts, namespaces, dynamic enums."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from verl.utils.time_limit import timeout_limit as timeout_limit  # upstream's path


def deep_equal(a: Any, b: Any) -> bool:
    """Equality of nested arrays, tensors, dicts and lists, in which NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or a.shape != b.shape:
            return False
        if a.dtype != object and b.dtype != object:
            return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc"))
        return all(deep_equal(x, y) for x, y in zip(a.ravel(), b.ravel(), strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(deep_equal(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(deep_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.is_nested or b.is_nested:
            return a.is_nested and b.is_nested and deep_equal(a.unbind(), b.unbind())
        b = b.to(a.device)
        return a.shape == b.shape and (torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()))
    return bool(a == b) or bool(a != a and b != b)


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


class DynamicEnumMeta(type):
    """Lets a DynamicEnum class be iterated, tested for membership and indexed by name."""

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls._registry.values())

    def __contains__(cls, item: Any) -> bool:
        return item.upper() in cls._registry if isinstance(item, str) else item in cls._registry.values()

    def __getitem__(cls, name: str) -> Any:
        member = cls.from_name(name)
        if member is None:
            raise KeyError(f"{cls.__name__} has no member {name!r}; known: {', '.join(cls.names())}")
        return member

    def names(cls) -> list[str]:
        return list(cls._registry)

    def values(cls) -> list[Any]:
        return list(cls._registry.values())


class DynamicEnum(metaclass=DynamicEnumMeta):
    """An enum whose members can be registered at run time; names are upper case, each subclass has its own."""

    _registry: dict[str, DynamicEnum] = {}
    _next_value: int = 0

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls._registry = {}
        cls._next_value = 0

    def __init__(self, name: str, value: int):
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"

    def __reduce__(self):
        return type(type(self)).__getitem__, (type(self), self.name)  # a member stays one object across processes

    @classmethod
    def register(cls, name: str) -> DynamicEnum:
        key = name.upper()
        if key in cls._registry:
            raise ValueError(f"{cls.__name__}.{key} is already registered; remove it first or take another name")
        cls._registry[key] = cls(key, cls._next_value)
        cls._next_value += 1
        setattr(cls, key, cls._registry[key])
        return cls._registry[key]

    @classmethod
    def remove(cls, name: str) -> DynamicEnum:
        member = cls[name]
        del cls._registry[member.name]
        delattr(cls, member.name)
        return member

    @classmethod
    def from_name(cls, name: str) -> DynamicEnum | None:
        return cls._registry.get(name.upper())


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
