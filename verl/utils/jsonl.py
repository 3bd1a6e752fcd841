"""Reads files of one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of each line that is not empty; a ValueError names the file and a torn line."""
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: no JSON ({error}).") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: {line.strip()[:60]} is no object with names and values.")
        yield number, row
