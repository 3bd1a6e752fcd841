"""The rollout and its judge: actions, hybrid contexts, completions by vLLM servers, grades and labels."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`SPDRollout`, the entry point of the rollout, which is imported when it is used."""
    if name != "SPDRollout":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from recipe.spd.rollout.spd_rollout import SPDRollout

    return SPDRollout


def __dir__() -> list[str]:
    return [*globals(), "SPDRollout"]
