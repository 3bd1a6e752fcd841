"""Writes the findings of an audit as tables in Markdown."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scripts.audit.names import Finding


@dataclass(frozen=True)
class Row:
    """A finding with its reason (empty: none) and whether it must be there: importers rely on it, or it is a key."""

    finding: Finding
    reason: str
    required: bool


def table_of(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    head, *lines = (f"| {' | '.join(map(str, cells))} |" for cells in (heads, *rows))
    return "\n".join([head, "|---" * len(heads) + "|", *lines])


def unexplained(rows: list[Row]) -> list[Row]:
    """What has no reason: everything that differs, and what is missing where it is relied on."""
    return [r for r in rows if _needs_reason(r) and not r.reason]


def _needs_reason(row: Row) -> bool:
    return row.finding.status == "differs" or (row.finding.status == "missing" and row.required)


def markdown(parts: dict[str, list[Row]]) -> str:
    """The summary table."""
    states, lines = ("same", "renamed", "differs", "missing"), []
    for part, rows in parts.items():
        counts = Counter(row.finding.status for row in rows)
        lines.append((part, *(counts[state] for state in states), len(unexplained(rows)), counts["ours alone"]))
    return table_of(("part", *states, "of these without a reason", "ours alone"), lines) + "\n"


def reasons_table(parts: dict[str, list[Row]]) -> str:
    """Why something is missing or differs: one line a reason, with the modules or trees it covers."""
    positions: dict[str, Counter[str]] = {}
    for rows in parts.values():
        for row in rows:
            if row.reason and _needs_reason(row):
                positions.setdefault(row.reason, Counter())[row.finding.module] += 1
    lines = [(reason, ", ".join(f"{module} ({count})" for module, count in sorted(modules.items())))
             for reason, modules in sorted(positions.items(), key=lambda entry: (min(entry[1]), entry[0]))]  # fmt: skip
    return table_of(("why", "where, and how many names or keys"), lines) + "\n"
