"""Shared by the scripts of this folder: converts local files to parquet files with verl's columns."""

import argparse
import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.rl_dataset import DatasetError, read_rows
from verl.utils.fs import output_folder

KINDS = (".parquet", ".jsonl", ".json", ".csv")
SPLITS = {"train": ("train",), "test": ("test", "validation", "val")}
Convert = Callable[[dict[str, Any], int, str], dict[str, Any]]  # (row, number, split) -> row of verl's columns


def run(convert: Convert, description: str, default_save_dir: str, argv: list[str] | None = None) -> None:
    """Command line: --local_dataset_path FOLDER_OR_FILE --local_save_dir FOLDER."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--local_dataset_path", type=Path, required=True, help="folder with train.*, test.*, or a file")
    folder = {"type": output_folder, "default": Path(default_save_dir), "help": "folder to write into"}
    parser.add_argument("--local_save_dir", **folder)
    parser.add_argument("--local_dir", type=output_folder, help="older name of --local_save_dir")
    args = parser.parse_args(argv)
    try:
        for file in save(convert, args.local_dataset_path, args.local_dir or args.local_save_dir):
            print(file)
    except (DatasetError, OSError) as error:
        sys.exit(str(error))


def save(convert: Convert, source: Path, target: Path, limit: int | None = None) -> list[Path]:
    """Convert the first `limit` rows (None: all) of each split in `source` (a folder or file); returns the files
    written."""
    target = target.expanduser()
    written = []
    for split, file in splits_of(source.expanduser()).items():
        rows = [_converted(convert, row, number, split, file) for number, row in enumerate(rows_of(file)[:limit])]
        if not rows:
            raise DatasetError(f"{file}: no rows.")
        target.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), target / f"{split}.parquet")
        written.append(target / f"{split}.parquet")
    return written


def splits_of(source: Path) -> dict[str, Path]:
    """{"train": file, "test": file} for the splits that exist; a single file is the training split."""
    if source.is_file():
        return {next((s for s, names in SPLITS.items() if source.stem.startswith(names)), "train"): source}
    files = sorted(f for f in source.rglob("*") if f.suffix in KINDS)
    splits = {split: [f for f in files if f.stem.startswith(names)] for split, names in SPLITS.items()}
    if several := [f for f in splits.values() if len(f) > 1]:
        raise DatasetError(f"{source}: {', '.join(f.name for f in several[0])} all look like one split; name one file.")
    if not any(splits.values()):
        raise DatasetError(f"{source}: no train.* or test.* of the kinds {', '.join(KINDS)}.")
    return {split: files[0] for split, files in splits.items() if files}


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of any of KINDS."""
    if file.suffix != ".csv":
        return read_rows(file)
    with open(file, newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def field(row: dict[str, Any], name: str) -> str:
    """A text column of a row."""
    if not isinstance(row.get(name), str):
        raise ValueError(f"column {name!r} holds no text; the columns are {', '.join(map(str, row))}")
    return row[name]


def _converted(convert: Convert, row: dict[str, Any], number: int, split: str, file: Path) -> dict[str, Any]:
    try:
        return convert(row, number, split)
    except ValueError as error:
        raise DatasetError(f"{file}, row {number}: {error}") from error
