"""Files with one JSON object per line: read, or replaced as a whole."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_objects(path: Path, growing: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of each line that is not empty.

    Raises ValueError, with file and line, for a line that is no object. A `growing` file may be missing, and its
    last line may be incomplete: it is left out.
    """
    if growing and not path.exists():
        return
    lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would also split at a U+2028 within a text
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if growing and number == len(lines):
                return
            raise ValueError(f"{path}, line {number}: not JSON ({error}); correct or remove the line.") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: {line.strip()[:60]} is not an object with names and values.")
        yield number, row


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically. Half a surrogate pair is written as JSON's escape of it."""
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(partial, path)
