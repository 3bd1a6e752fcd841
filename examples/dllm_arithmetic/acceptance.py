"""Acceptance criteria of a demo run, computed from its evaluation.json; each value must reach its minimum."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

LOSSLESS = ("greedy", "converge", "slide", "verify", "branch", "branch 3")
MINIMUM: dict[str, tuple[float, str]] = {
    "questions": (1000, "held-out questions"),
    "greedy_gap": (-2.0, "points, greedy accuracy of refined less twin"),
    "slide_tokens_per_forward": (3.5, "tokens per forward by slide"),
    "slide_same_as_greedy": (1.0, "share of slide's answers that equal greedy's"),
    "verify_tokens_per_forward": (5.0, "tokens per forward by verify"),
    "verify_same_as_greedy": (1.0, "share of verify's answers that equal greedy's"),
    "lossless_over_twin": (3.0, "times the twin's tokens per forward, best lossless mode of each"),
    "refine_1_tokens_per_forward": (3.5, "tokens per forward by refine 1"),
    "refine_1_gap": (-2.0, "points, accuracy by refine 1 less by greedy"),
    "twin_cpu": (1.0, "CPU seconds of the twin's training over the refined model's"),
}
"""Name of a criterion: its minimum, and a description."""


def criteria_of(results: Mapping[str, Any]) -> dict[str, float]:
    """The values of MINIMUM's criteria; `results` is the content of evaluation.json."""
    rows = {(row["model"], row["mode"]): row for row in results["rows"]}
    modes = {mode: rows["refined", mode] for mode in (*LOSSLESS, "refine 1")}
    # A refined mode that differs in one token does not count as lossless; the twin's best mode always counts.
    ours = [modes[mode]["tokens_per_forward"] for mode in LOSSLESS if modes[mode]["same_as_greedy"] == 1.0]
    twins = [rows["twin", mode]["tokens_per_forward"] for mode in LOSSLESS]
    cpu = results["cpu_seconds"]
    return {
        "questions": results["questions"],
        "greedy_gap": results["greedy_refined_less_twin"]["difference"],
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
    """Whether a value reaches its minimum."""
    return value >= MINIMUM[name][0]


def criteria_table(values: Mapping[str, float]) -> Table:
    """A row per criterion: value, minimum, and whether it is met."""
    table = Table("criterion", "value", "at least", "", title="Acceptance criteria")
    for name, (least, description) in MINIMUM.items():
        status = "met" if is_met(name, values[name]) else "[red]MISSED[/red]"
        table.add_row(description, f"{values[name]:.2f}", f"{least:g}", status)
    return table
