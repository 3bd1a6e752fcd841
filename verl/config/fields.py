"""Dataclass fields of settings: default, description, permitted values, and whether the setting is used."""

import copy
import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import MISSING

from verl.config.inert import NO_EFFECT, old_keys_of
from verl.utils.registry import nearest

BOUNDS = (  # rule, whether a value keeps it (NaN keeps none), what to say
    ("low", lambda value, bound: value >= bound, "too small; use {} or more"),
    ("above", lambda value, bound: value > bound, "too small; use a value above {}"),
    ("high", lambda value, bound: value <= bound, "too large; use {} or less"),
)


def setting(default: Any = dataclasses.MISSING, help: str = "", **rule: Any) -> Any:
    """A dataclass field of a config. `default` is a value, or a callable that makes one.

    `help` is one sentence for the yaml files and docs/config.md; a field without it is internal and in neither.
    Keys without effect are listed in `verl.config.inert` and old_keys.yaml.

    Permitted values: `low` and `high` are inclusive, `above` is exclusive; `choices` lists the values, `each_of` those
    of a list's items; `fixed` is the reason why only the default works. None is permitted where the annotation permits
    it. `hint` is added to the message of a refused value.
    """
    if unknown := set(rule) - {"low", "above", "high", "choices", "each_of", "fixed", "hint"}:
        raise TypeError(f"setting() has no rule {', '.join(sorted(unknown))}.")
    metadata = {"help": help, "rule": rule}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def field_types(dataclass_type: type) -> dict[str, Any]:
    """Resolved annotations of a dataclass, by field name."""
    return typing.get_type_hints(dataclass_type)


@functools.cache
def field_metadata(owner: type, name: str) -> Mapping[str, Any]:
    """Description (help), rules (rule) and why no run reads it (unused) of a field or a key of old scripts.

    Each is that of the nearest base class where a subclass changes the default.
    """
    if row := old_keys_of(owner).get(name):
        why = row.get("why")
        rule = {"choices": row["accepts"], "hint": row["hint"]} if "accepts" in row else {}
        rule = {"fixed": why} if "fixed" in row else rule
        return {"help": "", "rule": rule, "unused": None if rule or "new" in row else why}
    fields = [f for c in owner.__mro__ if dataclasses.is_dataclass(c) and (f := c.__dataclass_fields__.get(name))]
    rows = [f"{c.__name__}.{name}" for c in owner.__mro__]
    return {
        "help": next((f.metadata["help"] for f in fields if f.metadata.get("help")), ""),
        "rule": next((f.metadata["rule"] for f in fields if f.metadata.get("rule")), {}),
        "unused": next((NO_EFFECT[row] for row in rows if row in NO_EFFECT), None),
    }


def default_of(owner: type, name: str) -> Any:
    """The default of a field, the factory's where it has one, or of a key of old scripts."""
    if name in old_keys_of(owner):
        return copy.deepcopy(old_keys_of(owner)[name]["default"])
    field = owner.__dataclass_fields__[name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def known_names(owner: type) -> list[str]:
    """Names of the fields of a class and of what it accepts from old scripts."""
    return [*(field.name for field in dataclasses.fields(owner)), *old_keys_of(owner)]


def section_type(hint: Any) -> type | None:
    """The dataclass in an annotation such as `X` or `X | None`; None if there is none."""
    return next((t for t in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(t)), None)


def value_errors(dataclass_type: type, values: Mapping[str, Any], section: str) -> list[tuple[str, str]]:
    """(field name, message) for each value of a wrong type or out of range; nested dataclasses check themselves.

    `section` is the start of the keys in messages, empty for the root of a tree.
    """
    messages = []
    hints = field_types(dataclass_type)
    for name in known_names(dataclass_type):
        if name == "_target_" or name not in values or values[name] == MISSING:
            continue
        key, value, hint = f"{section}.{name}".lstrip("."), values[name], hints.get(name, Any)
        if not _fits(value, hint):
            messages.append((name, f"{key}={value!r} is a {type(value).__name__}; expected {type_name(hint)}."))
            continue
        rule = field_metadata(dataclass_type, name)["rule"]
        if "fixed" in rule and value != (only := default_of(dataclass_type, name)):
            shown = value if isinstance(value, str) else json.dumps(value)
            message = f"{key}={shown} does not work here: {rule['fixed']}. Set it to {json.dumps(only)}."
            messages.append((name, message))
        elif value is not None and (message := _range_error(key, value, rule)):
            messages.append((name, message))
    return messages


def check_settings(config: Any) -> None:
    """Raise one ValueError that lists every field of a dataclass instance that is out of order."""
    if errors := value_errors(type(config), vars(config), type(config).section):
        raise ValueError("\n".join(message for _, message in errors))


def refuse_unknown(group: str, settings: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ValueError for the first unknown setting of a config group, with the nearest known name."""
    for name in settings:
        if name not in known:
            raise ValueError(f"{group}.{name} is unknown{nearest(name, known) or '.'} Known: {', '.join(known)}.")


def type_name(hint: Any) -> str:
    """An annotation in the words of messages: `int or null`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(type_name(h) for h in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return f"list of {' or '.join(map(type_name, typing.get_args(hint)))}"
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
        if name in rule and not isinstance(value, str) and not keeps(value, rule[name]):
            return f"{key}={value} is {said.format(rule[name])}.{end}"
    return None
