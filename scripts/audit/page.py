"""Writes the findings of an audit: a table in Markdown, a page in HTML, lines for a terminal."""

from collections import Counter
from dataclasses import dataclass

import jinja2

from scripts.audit.names import Finding


@dataclass(frozen=True)
class Row:
    """A finding with its reason (empty: none) and whether it must be there: importers rely on it, or it is a key."""

    finding: Finding
    reason: str
    required: bool


def counts(rows: list[Row]) -> Counter[str]:
    """Findings by status."""
    return Counter(row.finding.status for row in rows)


def unexplained(rows: list[Row]) -> list[Row]:
    """What has no reason: everything that differs, and what is missing where it is relied on."""
    return [r for r in rows if _needs_reason(r) and not r.reason]


def _needs_reason(row: Row) -> bool:
    return row.finding.status == "differs" or (row.finding.status == "missing" and row.required)


def markdown(parts: dict[str, list[Row]]) -> str:
    """The summary table."""
    head = "| part | same | renamed | differs | missing | of these without a reason | ours alone |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for part, rows in parts.items():
        c = counts(rows)
        lines.append(
            f"| {part} | {c['same']} | {c['renamed']} | {c['differs']} | {c['missing']} | {len(unexplained(rows))} "
            f"| {c['ours alone']} |"
        )
    return "\n".join(lines) + "\n"


def reasons_table(parts: dict[str, list[Row]]) -> str:
    """Why something is missing or differs: one line a reason, with the modules or trees it covers."""
    positions: dict[str, Counter[str]] = {}
    for rows in parts.values():
        for row in rows:
            if row.reason and _needs_reason(row):
                positions.setdefault(row.reason, Counter())[row.finding.module] += 1
    lines = ["| why | where, and how many names or keys |", "|---|---|"]
    for reason, modules in sorted(positions.items(), key=lambda entry: (min(entry[1]), entry[0])):
        listing = ", ".join(f"{module} ({count})" for module, count in sorted(modules.items()))
        lines.append(f"| {reason} | {listing} |")
    return "\n".join(lines) + "\n"


PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title><style>
body { font: 14px/1.5 system-ui, sans-serif; margin: 24px auto; max-width: 1200px; color: #1c2330; padding: 0 20px; }
table { border-collapse: collapse; width: 100%; margin: 8px 0 20px; }
td, th { border: 1px solid #e3e7ee; padding: 3px 10px; text-align: left; vertical-align: top; }
th { background: #f6f8fb; } summary { cursor: pointer; font-weight: 600; margin: 6px 0; }
.missing { background: #fbe9e7; } .differs { background: #fdf4dd; } .bad { color: #b3261e; font-weight: 600; }
</style></head><body><h1>{{ title }}</h1>
<table><tr><th>part</th><th>same</th><th>renamed</th><th>differs</th><th>missing</th><th>without a reason</th>
<th>ours alone</th></tr>
{% for part, rows in parts.items() %}{% set c = counts(rows) %}<tr><td>{{ part }}</td><td>{{ c["same"] }}</td>
<td>{{ c["renamed"] }}</td><td>{{ c["differs"] }}</td><td>{{ c["missing"] }}</td>
<td>{{ unexplained(rows) | length }}</td>
<td>{{ c["ours alone"] }}</td></tr>
{% endfor %}</table>
{% if unfounded %}<h2>docs/migrating.md and docs/verl_names.md say, and the tree lacks</h2>
<ul>{% for line in unfounded %}<li>{{ line }}</li>{% endfor %}</ul>{% endif %}
{% for part, rows in parts.items() %}<h2>{{ part }}</h2>
{% for module, group in rows | groupby("finding.module") %}
<details><summary>{{ module }} ({{ group | length }})</summary>
<table><tr><th>name</th><th></th><th>how</th><th>why</th></tr>
{% for row in group if row.finding.status != "same" %}
<tr class="{{ row.finding.status }}"><td>{{ row.finding.name }}</td>
<td>{{ row.finding.status }}</td><td>{{ row.finding.detail }}</td><td>{{ row.reason }}
{% if row in unexplained([row]) %}<span class="bad">no reason</span>{% endif %}</td></tr>
{% endfor %}</table></details>{% endfor %}{% endfor %}</body></html>
"""


def html(title: str, parts: dict[str, list[Row]], unfounded: list[str]) -> str:
    """The page."""
    env = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return env.from_string(PAGE).render(
        title=title, parts=parts, unfounded=unfounded, counts=counts, unexplained=unexplained
    )
