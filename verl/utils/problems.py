"""What is wrong with a run, said before it starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

WRONG = "wrong"  # cannot work on any machine
ABSENT = "absent"  # would work where the missing thing is present


@dataclass(frozen=True)
class Problem:
    """One finding: `key` is the config key to change, `message` says what is wrong with its value, and the mend."""

    kind: str
    key: str
    message: str

    def __post_init__(self) -> None:
        if self.kind not in (WRONG, ABSENT):
            raise ValueError(f"Problem.kind={self.kind!r} is unknown; use {WRONG!r} or {ABSENT!r}.")


class ConfigError(ValueError):
    """A config that cannot run anywhere; lists everything that is wrong with it."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        head = "1 problem in the config:" if count == 1 else f"{count} problems in the config:"
        super().__init__("\n".join([head, *(f"  - {p.message}" for p in self.problems)]))

    def __reduce__(self) -> tuple:
        return type(self), (self.problems,)


def wrong(key: str, message: str) -> Problem:
    """A problem on every machine."""
    return Problem(WRONG, key, message)


def absent(key: str, message: str) -> Problem:
    """A problem on this machine only."""
    return Problem(ABSENT, key, message)
