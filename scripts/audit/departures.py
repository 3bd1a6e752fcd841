"""Checks the table of departures in docs/migrating.md: its defaults are compared, the other rows are shown by tests."""

import ast
import functools
import re
from pathlib import Path

import yaml

from scripts.audit.changes import DEPARTURES, section, tables
from scripts.audit.keys import OURS, TREES, our_keys, shown

FILE = Path(__file__).with_name("departures.yaml")


def unfounded(
    page: Path, root: Path, theirs: dict[str, dict[str, object]] | None = None, file: Path = FILE
) -> list[str]:
    """Rows that nothing shows, and rows whose values are not the defaults: ours, and upstream's where it is given."""
    grounds = yaml.safe_load(file.read_text(encoding="utf-8"))
    listed_tables = tables(section(page.read_text(encoding="utf-8"), DEPARTURES))
    rows = [row for table in listed_tables for row in table]
    wrong = []
    for row in rows:
        listed = grounds.get(row[0], [])
        listed = listed if isinstance(listed, list) else [listed]
        wrong += [f"row {row[0][:60]!r} {error}" for error in _of_row(row, listed, root, theirs)]
    gone = grounds.keys() - {row[0] for row in rows}
    return wrong + [f"{file.name}: {what[:60]!r} is not a row of the table any more" for what in sorted(gone)]


def _of_row(row: list[str], grounds: list[str], root: Path, theirs: dict[str, dict[str, object]] | None) -> list[str]:
    if len(row) != 4:
        return [f"has {len(row)} cells, not 4"]
    if not grounds:
        return [f"has no ground: enter the keys whose defaults it states, or tests that show it, in {FILE.name}"]
    tests, keys = [g for g in grounds if "::" in g], [g for g in grounds if "::" not in g]
    wrong = [f"names a test that is not there: {test}" for test in tests if not is_test(root, test)]
    return wrong + (_compared(keys, row[1], row[2], theirs) if keys else [])


def _compared(keys: list[str], upstream: str, here: str, theirs: dict[str, dict[str, object]] | None) -> list[str]:
    """What the cells say wrongly of the keys' defaults."""
    pairs = [key.partition(":")[::2] for key in keys]
    known = {(tree, key) for tree in {tree for tree, _ in pairs} & OURS.keys() for key in our_keys(tree)}
    if unknown := [f"names a key that is not there: {tree}:{key}" for tree, key in pairs if (tree, key) not in known]:
        return unknown
    wrong = _says(here, [our_keys(tree)[key] for tree, key in pairs])
    files = {tree: file for file, tree in TREES.items()}
    if theirs is not None and {tree for tree, _ in pairs} <= files.keys():
        trees = {tree: theirs[files[tree]] for tree, _ in pairs}
        wrong += _says(upstream, [trees[tree].get(key) for tree, key in pairs])
    return wrong


def _says(cell: str, defaults: list[object]) -> list[str]:
    """Whether a cell begins with these defaults (once, where all are alike); what is wrong otherwise."""
    texts = list(dict.fromkeys(map(_plain, defaults)))
    wanted = ", ".join(texts)
    begins = re.match(rf"{re.escape(wanted)}(?![\w.])", cell.replace("`", ""))
    return [] if begins else [f"says {cell!r}, which does not begin with the default, {wanted}"]


def _plain(value: object) -> str:
    words = isinstance(value, list) and all(isinstance(v, str) for v in value)
    return ", ".join(value) if words else shown(value)


def is_test(root: Path, name: str) -> bool:
    """Whether tests/file.py::test_function is there."""
    file, _, function = name.partition("::")
    return (root / file).is_file() and function in _functions(root / file)


@functools.cache
def _functions(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
