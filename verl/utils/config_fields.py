"""Dataclass fields that carry their own range, so that the check stands beside the default."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import MISSING

from verl.utils.registry import nearest


def setting(
    default: Any = dataclasses.MISSING,
    *,
    factory: Any = dataclasses.MISSING,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    choices: Sequence[Any] | None = None,
    each_of: Sequence[Any] | None = None,
    hint: str = "",
) -> Any:
    """A dataclass field with its permitted values.

    low and high are inclusive, above is exclusive; `choices` lists the permitted values, `each_of` those of a list's
    items. None is permitted where the annotation permits it. `hint` is the mend, shown when the value is refused.
    """
    rule = {"low": low, "above": above, "high": high, "choices": choices, "each_of": each_of, "hint": hint}
    return dataclasses.field(default=default, default_factory=factory, metadata={"rule": rule})


def choice_error(key: str, value: Any, known: Sequence[Any]) -> str:
    """The sentence for a value outside a closed list."""
    names = [str(k) for k in known]
    return f"{key}={value!r} is unknown{nearest(str(value), names) or '.'} Known: {', '.join(names)}."


@functools.cache
def field_types(dataclass_type: type) -> dict[str, Any]:
    """Resolved annotations of a dataclass, by field name."""
    return typing.get_type_hints(dataclass_type)


def value_errors(dataclass_type: type, values: Mapping[str, Any], section: str) -> list[tuple[str, str]]:
    """(field name, message) for each value of a wrong type or out of range; nested dataclasses check themselves."""
    found = []
    hints = field_types(dataclass_type)
    for field in dataclasses.fields(dataclass_type):
        if field.name == "_target_" or field.name not in values:
            continue
        value = values[field.name]
        key = f"{section}.{field.name}" if section else field.name
        if value == MISSING:
            continue
        message = _type_error(key, value, hints[field.name]) or _range_error(key, value, field.metadata.get("rule"))
        if message:
            found.append((field.name, message))
    return found


def check_settings(config: Any) -> None:
    """Raise one ValueError that lists every field of a dataclass instance that is out of order."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    errors = value_errors(type(config), values, type(config).section)
    if errors:
        raise ValueError("\n".join(message for _, message in errors))


def _type_error(key: str, value: Any, hint: Any) -> str | None:
    if _fits(value, hint):
        return None
    return f"{key}={value!r} is a {type(value).__name__}; expected {_type_name(hint)}."


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
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin in (list, tuple):
        items = [h for h in typing.get_args(hint) if h is not Ellipsis]
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return is_list and all(any(_fits(v, h) for h in items) or not items for v in value)
    if origin is dict or dataclasses.is_dataclass(origin):
        return isinstance(value, Mapping)
    return isinstance(value, origin)


def _range_error(key: str, value: Any, rule: dict[str, Any] | None) -> str | None:
    if rule is None or value is None:
        return None
    end = f" {rule['hint']}" if rule["hint"] else ""
    if rule["choices"] is not None and value not in rule["choices"]:
        return choice_error(key, value, rule["choices"]) + end
    if rule["each_of"] is not None:
        for item in value:
            if item not in rule["each_of"]:
                return choice_error(key, item, rule["each_of"]) + end
    if rule["low"] is not None and value < rule["low"]:
        return f"{key}={value} is too small; use {rule['low']} or more.{end}"
    if rule["above"] is not None and value <= rule["above"]:
        return f"{key}={value} is too small; use a value above {rule['above']}.{end}"
    if rule["high"] is not None and value > rule["high"]:
        return f"{key}={value} is too large; use {rule['high']} or less.{end}"
    return None
