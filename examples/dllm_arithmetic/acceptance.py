"""What a run of the demo has to show, read from its evaluation.json; each figure is wanted at its least or above."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

LOSSLESS = ("greedy", "converge", "slide", "verify")
LEAST: dict[str, tuple[float, str]] = {
    "questions": (1000, "held-out questions"),
    "greedy_gap": (-2.0, "points, greedy accuracy of refined less twin"),
    "slide_tokens_per_forward": (3.5, "tokens a forward by slide"),
    "slide_same_as_greedy": (1.0, "share of slide's answers that equal greedy's"),
    "verify_tokens_per_forward": (5.0, "tokens a forward by verify"),
    "verify_same_as_greedy": (1.0, "share of verify's answers that equal greedy's"),
    "lossless_over_twin": (3.0, "times the twin's tokens a forward, best lossless mode of each"),
    "refine_1_tokens_per_forward": (3.5, "tokens a forward by refine 1"),
    "refine_1_gap": (-2.0, "points, accuracy by refine 1 less by greedy"),
    "twin_cpu": (1.0, "CPU seconds of the twin's training over the refined model's"),
}
"""Figure: its least value, and what it is."""


def figures(found: Mapping[str, Any]) -> dict[str, float]:
    """The figures of LEAST, of evaluation.json's content."""
    rows = {(row["model"], row["mode"]): row for row in found["rows"]}
    modes = {mode: rows["refined", mode] for mode in (*LOSSLESS, "refine 1")}
    # A mode of ours that lost a token does not count as lossless; the twin keeps its best in any case.
    ours = [modes[mode]["tokens_per_forward"] for mode in LOSSLESS if modes[mode]["same_as_greedy"] == 1.0]
    twins = [rows["twin", mode]["tokens_per_forward"] for mode in LOSSLESS]
    cpu = found["cpu_seconds"]
    return {
        "questions": found["questions"],
        "greedy_gap": found["greedy_refined_less_twin"]["difference"],
        "slide_tokens_per_forward": modes["slide"]["tokens_per_forward"],
        "slide_same_as_greedy": modes["slide"]["same_as_greedy"],
        "verify_tokens_per_forward": modes["verify"]["tokens_per_forward"],
        "verify_same_as_greedy": modes["verify"]["same_as_greedy"],
        "lossless_over_twin": max(ours) / max(twins),
        "refine_1_tokens_per_forward": modes["refine 1"]["tokens_per_forward"],
        "refine_1_gap": round(100 * (modes["refine 1"]["accuracy"] - modes["greedy"]["accuracy"]), 6),
        "twin_cpu": cpu["twin"] / cpu["refined"],
    }


def is_met(name: str, value: float) -> bool:
    """Whether the figure reaches its least."""
    return value >= LEAST[name][0]


def demand_table(values: Mapping[str, float]) -> Table:
    """A line a figure, with its least and whether it is met."""
    table = Table("demand", "value", "at least", "", title="What the run has to show")
    for name, (least, what) in LEAST.items():
        said = "met" if is_met(name, values[name]) else "[red]MISSED[/red]"
        table.add_row(what, f"{values[name]:.2f}", f"{least:g}", said)
    return table
