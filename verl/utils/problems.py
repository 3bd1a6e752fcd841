"""Problems of a run, reported before it starts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from verl.utils.visible_text import visible

WRONG = "wrong"  # cannot work on any machine
ABSENT = "absent"  # would work where the missing thing is present
UNUSED = "unused"  # a setting without effect; no reason to refuse the run
TITLES = {WRONG: "Wrong on every machine", ABSENT: "Absent on this machine", UNUSED: "Warnings"}
SHARE_NAMED = 0.1  # a larger share of rows or samples that a run leaves out is named


@dataclass(frozen=True)
class Problem:
    """`key` is the config key to change, `message` says what is wrong with its value and what to do."""

    kind: str
    key: str
    message: str

    def __post_init__(self) -> None:
        if self.kind not in TITLES:
            raise ValueError(f"Problem.kind={self.kind!r} is unknown; use one of {', '.join(TITLES)}.")


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


def one_line(value: Any) -> str:
    """A value, or the text of an error, short enough for a message."""
    text = visible(" ".join(str(value).split())) or type(value).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def raise_if_any(problems: Iterable[Problem]) -> None:
    """One ConfigError with everything that is wrong on every machine, if anything is."""
    if fatal := [p for p in problems if p.kind == WRONG]:
        raise ConfigError(fatal)


# (config, findings of verl.planning.checks: tokenizer, hf_config, ...) -> problems
Check = Callable[[Any, Any], Iterable[Problem]]
CHECKS: list[Check] = []


def register_check(check: Check) -> Check:
    """Decorator: a check of a recipe's own, made by every dry run that imports its module (external_lib, custom_cls).

    It gets the typed config and what the dry run knows; `findings.tokenizer` is None where it could not be loaded.
    """
    if check not in CHECKS:
        CHECKS.append(check)
    return check
