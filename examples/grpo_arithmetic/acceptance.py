"""What a run of the demo has to show: learning, more of it than the control's, within its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GAIN, ENOUGH = 1.5, 0.90  # times the start's accuracy, or an accuracy that leaves no room for it
TIME_S = 720.0  # behind the set-up


@dataclass(frozen=True)
class Demand:
    """A figure in words, what is wanted of it, whether it is so."""

    what: str
    value: str
    wanted: str
    met: bool


def has_learned(start: float, end: float) -> bool:
    """Whether accuracy rose as wanted; both from 0 to 1."""
    return end > ENOUGH or (end > 0 and round(end - GAIN * start, 9) >= 0)


def demands_of(trained: Mapping[int, float], control: Mapping[int, float], seconds: float) -> dict[str, Demand]:
    """Of the validation accuracies by step, from the start's (step 0), and of the time of the whole run."""
    start, end, same = next(iter(trained.values())), list(trained.values())[-1], list(control.values())[-1]
    gain = f" ({end / start:.2f} times)" if start else ""
    return {
        "learned": Demand(
            "validation accuracy, start to end", f"{100 * start:.1f} % to {100 * end:.1f} %{gain}",
            f"at least {GAIN:g} times the start's, or above {100 * ENOUGH:.0f} %", has_learned(start, end),
        ),
        "over_control": Demand(
            f"validation accuracy against the control's (learning rate 0, {max(control)} of {max(trained)} steps)",
            f"{100 * end:.1f} % against {100 * same:.1f} %", "above it", end > same,
        ),
        "seconds": Demand("time behind the set-up", f"{seconds:.0f} s", f"under {TIME_S:.0f} s", seconds < TIME_S),
    }  # fmt: skip


def lines(demands: Mapping[str, Demand]) -> list[str]:
    """A line a demand, in rich's markup."""
    said = {True: "met", False: "[red]MISSED[/red]"}
    return [f"{d.what}: {d.value}; wanted: {d.wanted}: {said[d.met]}" for d in demands.values()]
