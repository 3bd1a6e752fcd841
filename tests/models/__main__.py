"""Prints what works for each model family and chat template, and fails where that is not the stored table.

python -m tests.models [--write] [families] [templates]: stores the tables, from which scripts/make_docs.py writes
docs/models.md; both, unless one is named.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

Rows = dict[str, dict[str, str]]


def families() -> Iterator[tuple[str, dict[str, str]]]:
    """Tiny models, one after the other."""
    from tests.models.checks import observed
    from tests.models.families import FAMILIES
    from tests.models.in_vllm import observed_in_vllm

    for name in FAMILIES:
        try:
            yield name, observed(name) | observed_in_vllm(name)
        except Exception as error:  # noqa: BLE001 - the other families are shown too
            yield name, {"fails": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def templates() -> Iterator[tuple[str, dict[str, str]]]:
    """Chat templates of published models, which are fetched first."""
    from tests.models.templates import fetch, observed_templates

    fetch()
    yield from observed_templates().items()


#: name -> (the rows, the file of the stored ones, columns that are not printed)
TABLES: dict[str, tuple[Callable[[], Iterator[tuple[str, dict[str, str]]]], str, tuple[str, ...]]] = {
    "families": (families, "table.json", ("has",)), "templates": (templates, "templates.json", ("sha256", "testable")),
}  # fmt: skip


def compared(name: str, write: bool) -> list[str]:
    """The rows that fail, or are not those of the stored table."""
    observe, file, hidden = TABLES[name]
    path, rows = Path(__file__).with_name(file), {}
    for key, row in observe():
        rows[key] = row
        print(f"{key:16} " + ", ".join(f"{column}: {value}" for column, value in row.items() if column not in hidden))
    wrong = [key for key, row in rows.items() if "fails" in row]
    if write and not wrong:
        path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        return []
    known = json.loads(path.read_text()) if path.exists() else {}
    wrong += [key for key in {**known, **rows} if rows.get(key) != known.get(key) and key not in wrong]
    if wrong:
        print(f"not as in {path.name}: {', '.join(wrong)}")
    return wrong


if __name__ == "__main__":
    named = [name for name in TABLES if name in sys.argv[1:]] or list(TABLES)
    sys.exit(any([compared(name, "--write" in sys.argv[1:]) for name in named]))
