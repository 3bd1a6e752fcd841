"""Files with one JSON object per line: read, replaced as a whole, or set aside."""

import json
import os
import shutil
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


def set_aside(path: Path, copy: bool = False) -> Path | None:
    """Rename (or copy) a non-empty file, or a folder, to the next free NAME.<n>.SUFFIX; the new path, or None if there
    is nothing to keep."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    number = next(n for n in range(1, 1_000_000) if not path.with_suffix(f".{n}{path.suffix}").exists())
    kept = path.with_suffix(f".{number}{path.suffix}")
    shutil.copyfile(path, kept) if copy else os.replace(path, kept)
    return kept


def set_dumps_aside(folder: Path, step: int) -> Path | None:
    """Move the files <n>.jsonl of steps after `step` into a new folder earlier_<i> within `folder`; that folder."""
    later = [file for file in folder.glob("*.jsonl") if file.stem.isdecimal() and int(file.stem) > step]
    if not later:
        return None
    kept = next(path for n in range(1, 1_000_000) if not (path := folder / f"earlier_{n}").exists())
    kept.mkdir()
    for file in later:
        os.replace(file, kept / file.name)
    return kept
