"""A table of named plug-ins that suggests the nearest entry for an unknown name, and plug-ins of installed packages."""

import difflib
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean 'x'?` when a known name is close to `name`, whatever its case, else an empty text."""
    lower = {entry.lower(): entry for entry in known}
    close = difflib.get_close_matches(str(name).lower(), lower, n=1)
    return f"; did you mean '{lower[close[0]]}'?" if close else ""


@cache
def installed_plugins(kind: str) -> dict[str, str]:
    """Name -> dotted name of the plug-ins that installed packages declare as entry points of the group `verl.<kind>`.

    The groups are `verl.rollouts` (names `<rollout.name>.<rollout.mode>`), `verl.auxiliary_losses` and
    `verl.reward_rules` (names are data sources).
    """
    return {point.name: point.value.replace(":", ".") for point in entry_points(group=f"verl.{kind}")}


class Registry(dict[K, T]):
    """A table from names to plug-ins of one kind. `find` lists the known names if one is unknown.

    `key` is the config key that a user sets (`algorithm.adv_estimator`); `howto` says how to add an entry.
    """

    def __init__(self, key: str, howto: str) -> None:
        super().__init__()
        self.key = key
        self.howto = howto

    def register(self, name: K) -> Callable[[T], T]:
        """Decorator that enters an object under `name` and returns it.

        The same object (or the same definition, imported twice) may be registered again; another one of that name
        raises ValueError.
        """

        def enter(entry: T) -> T:
            present, origin = self.get(name), _origin(entry)
            taken = present is not None and present is not entry  # a module imported twice registers again
            if taken and (_origin(present) != origin or "<locals>" in origin):
                shown = "/".join(name) if isinstance(name, tuple) else name
                by = _origin(present)
                raise ValueError(f"{self.key}: '{shown}' is already registered by {by}; {origin} needs another name.")
            self[name] = entry
            return entry

        return enter

    def find(self, name: K) -> T:
        """The entry called `name`; ValueError with the nearest name if there is none."""
        if name not in self:
            known = sorted(map(str, self))
            hint = nearest(name, known) or "."
            raise ValueError(f"{self.key}={name!r} is unknown{hint} Known: {', '.join(known)}. {self.howto}")
        return self[name]


def _origin(entry: object) -> str:
    return entry if isinstance(entry, str) else f"{entry.__module__}.{entry.__qualname__}"  # str: a dotted name
