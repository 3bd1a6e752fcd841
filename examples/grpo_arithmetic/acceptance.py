"""Acceptance criteria of a demo run: it learns, more than its control, within its time."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from examples.demo_runner import console

GAIN, ENOUGH = 1.5, 0.90  # times the start's accuracy, or an accuracy that leaves no room for it
TIME_S = 720.0  # after the set-up


@dataclass(frozen=True)
class Criterion:
    """A description, its value, the required value, and whether it is met; all but `met` as text."""

    what: str
    value: str
    wanted: str
    met: bool


def has_learned(start: float, end: float) -> bool:
    """Whether accuracy rose enough; both values lie in [0, 1]."""
    return end > ENOUGH or (end > 0 and round(end - GAIN * start, 9) >= 0)


def criteria_of(trained: Mapping[int, float], control: Mapping[int, float], seconds: float) -> dict[str, Criterion]:
    """Criteria by name, from validation accuracies by step (step 0 is the start) and the run's time in seconds."""
    start, end, same = next(iter(trained.values())), list(trained.values())[-1], list(control.values())[-1]
    gain = f" ({end / start:.2f} times)" if start else ""
    return {
        "learned": Criterion(
            "validation accuracy, start to end", f"{100 * start:.1f} % to {100 * end:.1f} %{gain}",
            f"at least {GAIN:g} times the start's, or above {100 * ENOUGH:.0f} %", has_learned(start, end),
        ),
        "over_control": Criterion(
            f"validation accuracy against the control's (learning rate 0, {max(control)} of {max(trained)} steps)",
            f"{100 * end:.1f} % against {100 * same:.1f} %", "above it", end > same,
        ),
        "seconds": Criterion("time after the set-up", f"{seconds:.0f} s", f"under {TIME_S:.0f} s", seconds < TIME_S),
    }  # fmt: skip


def report(
    out: Path, result: Mapping[str, Any], criteria: Mapping[str, Criterion], title: str,
    columns: Mapping[str, Mapping[str, Mapping[int, float]]],
) -> None:  # fmt: skip
    """Write OUT/result.json with the criteria; print them after a table of shares: by heading, run and step."""
    result = {**result, "criteria": {name: asdict(criterion) for name, criterion in criteria.items()}}
    (out / "result.json").write_text(json.dumps(result, indent=1))
    table = Table("", "step", *columns, title=title)
    for name, steps in next(iter(columns.values())).items():
        for step in steps:
            table.add_row(name, str(step), *(f"{100 * values[name][step]:.1f}" for values in columns.values()))
        table.add_section()
    console.print(table)
    status = {True: "met", False: "[red]MISSED[/red]"}
    lines = (f"{c.what}: {c.value}; required: {c.wanted}: {status[c.met]}" for c in criteria.values())
    console.print("Acceptance criteria", *lines, sep="\n  ", highlight=False, soft_wrap=True)
