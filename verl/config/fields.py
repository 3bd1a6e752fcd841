"""Dataclass fields that carry their permitted values next to their default."""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import MISSING

from verl.utils.registry import nearest

BOUNDS = (  # rule, whether a value keeps it (NaN keeps none), what to say
    ("low", lambda value, bound: value >= bound, "too small; use {} or more"),
    ("above", lambda value, bound: value > bound, "too small; use a value above {}"),
    ("high", lambda value, bound: value <= bound, "too large; use {} or less"),
)


def setting(default: Any = dataclasses.MISSING, *, factory: Any = dataclasses.MISSING, **rule: Any) -> Any:
    """A dataclass field with its permitted values.

    `low` and `high` are inclusive, `above` is exclusive; `choices` lists the permitted values, `each_of` those of a
    list's items. None is permitted where the annotation permits it. `hint` is added to the message of a refused value.
    """
    if unknown := set(rule) - {"low", "above", "high", "choices", "each_of", "hint"}:
        raise TypeError(f"setting() has no rule {', '.join(sorted(unknown))}.")
    return dataclasses.field(default=default, default_factory=factory, metadata={"rule": rule})


@functools.cache
def field_types(dataclass_type: type) -> dict[str, Any]:
    """Resolved annotations of a dataclass, by field name."""
    return typing.get_type_hints(dataclass_type)


def value_errors(dataclass_type: type, values: Mapping[str, Any], section: str) -> list[tuple[str, str]]:
    """(field name, message) for each value of a wrong type or out of range; nested dataclasses check themselves.

    `section` is the start of the keys in messages, empty for the root of a tree.
    """
    messages = []
    hints = field_types(dataclass_type)
    for field in dataclasses.fields(dataclass_type):
        if field.name == "_target_" or field.name not in values or values[field.name] == MISSING:
            continue
        key, value, hint = f"{section}.{field.name}".lstrip("."), values[field.name], hints[field.name]
        if not _fits(value, hint):
            messages.append((field.name, f"{key}={value!r} is a {type(value).__name__}; expected {_type_name(hint)}."))
        elif value is not None and (message := _range_error(key, value, field.metadata.get("rule", {}))):
            messages.append((field.name, message))
    return messages


def check_settings(config: Any) -> None:
    """Raise one ValueError that lists every field of a dataclass instance that is out of order."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    if errors := value_errors(type(config), values, type(config).section):
        raise ValueError("\n".join(message for _, message in errors))


def _type_name(hint: Any) -> str:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(_type_name(h) for h in typing.get_args(hint))
    return "null" if hint is types.NoneType else str(getattr(hint, "__name__", hint))


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    if origin is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if origin in (int, float):
        return isinstance(value, int | origin) and not isinstance(value, bool)
    if origin in (list, tuple):
        items = [h for h in typing.get_args(hint) if h is not Ellipsis]
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return is_list and all(any(_fits(v, h) for h in items) or not items for v in value)
    if origin is dict or dataclasses.is_dataclass(origin):
        return isinstance(value, Mapping)
    return isinstance(value, origin)


def _range_error(key: str, value: Any, rule: Mapping[str, Any]) -> str | None:
    end = f" {rule['hint']}" if "hint" in rule else ""
    for name, items in (("choices", [value]), ("each_of", value)):
        for item in items if name in rule else []:
            if item not in rule[name]:
                known = [str(k) for k in rule[name]]
                near = nearest(str(item), known) or "."
                return f"{key}={item!r} is unknown{near} Known: {', '.join(known)}.{end}"
    for name, keeps, said in BOUNDS:
        if name in rule and not keeps(value, rule[name]):
            return f"{key}={value} is {said.format(rule[name])}.{end}"
    return None
