"""Yaml files that list classes with their settings: tools, interactions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic import ValidationError


def each_entry(file: str, key: str, build: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """`build(entry)` of each entry in the list under `key` of a yaml file, interpolations resolved.

    Each entry is a mapping with a `class_name`. FileNotFoundError or ValueError name the file, and the entry whose
    `build` raised.
    """
    if not Path(file).is_file():
        raise FileNotFoundError(f"there is no file {str(file)!r} that lists the {key}")
    try:
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except Exception as error:
        raise ValueError(f"{file}: no readable yaml: {error}") from error
    entries = content.get(key) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f"{file}: the key '{key}' is missing or no list; expected '{key}:' with a list of classes")
    built = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
            raise ValueError(f"{file}, {key}[{number}]: expected a mapping with a class_name (package.module.Class)")
        if not isinstance(entry.get("config") or {}, dict):
            raise ValueError(f"{file}, {key}[{number}]: config is a {type(entry['config']).__name__}, not a mapping")
        try:
            built.append(build(entry))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            elif isinstance(error, ValueError | TypeError | ImportError | AttributeError):
                reason = str(error)
            raise ValueError(f"{file}, {key}[{number}] ({entry['class_name']}): {reason}") from error
    return built
