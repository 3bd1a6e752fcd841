"""A registry of named plug-ins that suggests the nearest entry for an unknown name."""

import difflib
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean 'x'?` when a known name is close to `name`, else an empty text."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


class Registry(Generic[T]):
    """Names to plug-ins of one kind. A name can be registered once; the error for an unknown one lists them.

    `key` is the config key that a user sets (`algorithm.adv_estimator`); `howto` says how to add an entry.
    """

    def __init__(self, key: str, howto: str) -> None:
        self.key = key
        self.howto = howto
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that enters an object under `name`; a second, different object of that name is refused."""

        def enter(entry: T) -> T:
            present = self._entries.get(name)
            if present is not None and not _same_origin(present, entry):
                taken = f"'{name}' is already registered by {_origin(present)}"
                raise ValueError(f"{self.key}: {taken}; {_origin(entry)} needs another name.")
            self._entries[name] = entry
            return entry

        return enter

    def get(self, name: str) -> T:
        """The entry called `name`."""
        if name not in self._entries:
            known = sorted(self._entries)
            hint = nearest(name, known) or "."
            raise ValueError(f"{self.key}={name!r} is unknown{hint} Known: {', '.join(known)}. {self.howto}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries


def _origin(entry: object) -> str:
    return f"{entry.__module__}.{entry.__qualname__}"


def _same_origin(present: object, entry: object) -> bool:
    """True when a module was imported twice and registers the same definition again."""
    return present is entry or _origin(present) == _origin(entry) and "<locals>" not in _origin(entry)
