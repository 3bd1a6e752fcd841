"""Registries of named plug-ins, which suggest the nearest name for an unknown one."""

import difflib
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean 'x'?` for the known name that is most similar to `name`, ignoring case; "" if none is similar."""
    lower = {entry.lower(): entry for entry in known}
    close = difflib.get_close_matches(str(name).lower(), lower, n=1)
    return f"; did you mean '{lower[close[0]]}'?" if close else ""


@cache
def installed_plugins(kind: str) -> dict[str, str]:
    """{name: dotted path} of the entry points that installed packages declare in the group `verl.<kind>`.

    The groups are `verl.rollouts` (the name is `<rollout.name>.<rollout.mode>`), `verl.rollouts_of_the_actor` (the name
    is the `rollout.name` of one that generates with the actor's own module), `verl.auxiliary_losses`, `verl.metrics`
    (the name is the recipe's) and `verl.reward_rules` (the name is a data source).
    """
    return {point.name: point.value.replace(":", ".") for point in entry_points(group=f"verl.{kind}")}


class Registry(dict[K, T]):
    """A dictionary of plug-ins of one kind by name.

    Args:
        key: the configuration key that selects an entry (`algorithm.adv_estimator`), for error messages.
        howto: how to add an entry, for error messages.
    """

    def __init__(self, key: str, howto: str) -> None:
        super().__init__()
        self.key, self.howto = key, howto

    def register(self, name: K) -> Callable[[T], T]:
        """Decorator that registers an object under `name` and returns it.

        The same object may be registered again, also as a second import of the same definition (one path, but another
        object); a function defined inside another is new each time. Raises ValueError if another object has that name.
        """

        def decorator(entry: T) -> T:
            registered = self.get(name, entry)
            origin, other = _origin(entry), _origin(registered)
            if registered is not entry and (other != origin or "<locals>" in origin):
                shown = "/".join(name) if isinstance(name, tuple) else name
                raise ValueError(
                    f"{self.key}: '{shown}' is already registered by {other}; {origin} needs another name."
                )
            self[name] = entry
            return entry

        return decorator

    def find(self, name: K) -> T:
        """The entry `name`. Raises ValueError with the nearest and all known names if it is not registered."""
        if name not in self:
            known = sorted(map(str, self))
            hint = nearest(name, known) or "."
            raise ValueError(f"{self.key}={name!r} is unknown{hint} Known: {', '.join(known)}. {self.howto}")
        return self[name]


def _origin(entry: object) -> str:
    """The dotted path of an entry; plug-ins that are imported when they are used are entries by their path."""
    return entry if isinstance(entry, str) else f"{entry.__module__}.{entry.__qualname__}"
