"""Drafted blocks in columns: an Arrow table instead of one Python object for each number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from verl.data.parquet import open_parquet
from verl.data.rl_dataset import read_rows

ROWS_AT_A_TIME = 2048  # read, checked or written together


class TableRows(Sequence):
    """The rows of an Arrow table; each becomes plain Python when it is read, and is not kept."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __len__(self) -> int:
        return self.table.num_rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for first in range(0, len(self), ROWS_AT_A_TIME):
            yield from self.table.slice(first, ROWS_AT_A_TIME).to_pylist()

    def __getitem__(self, item: int) -> dict[str, Any]:
        return self.table.slice(range(len(self))[item], 1).to_pylist()[0]

    def __add__(self, other: TableRows | list[dict[str, Any]]) -> TableRows | list[dict[str, Any]]:
        if not isinstance(other, TableRows):
            return [*self, *other]
        return TableRows(pa.concat_tables([self.table, other.table], promote_options="permissive"))

    def __radd__(self, other: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [*other, *self]

    def take(self, numbers: Sequence[int]) -> TableRows:
        """The rows of these numbers, in this order."""
        return TableRows(self.table.take(pa.array(numbers, pa.int64())))


def read_table_rows(path: str | Path) -> TableRows | list[dict[str, Any]]:
    """The rows of a data file, those of parquet in columns. Raises DatasetError as `read_rows` does."""
    try:
        return TableRows(pa.Table.from_batches(_batches(path, whole=True)))
    except Exception:  # no parquet, or damaged: read_rows says what is wrong
        return read_rows(path)


def row_batches(path: str | Path) -> Iterator[list[dict[str, Any]]]:
    """The rows of a data file as plain Python, some at a time. Raises DatasetError as `read_rows` does."""
    try:
        batches: Iterator[Any] = _batches(path, whole=False)
        first = next(batches, None)
    except Exception:
        rows = read_rows(path)
        yield from (rows[i : i + ROWS_AT_A_TIME] for i in range(0, len(rows), ROWS_AT_A_TIME))
        return
    while first is not None:
        yield first.to_pylist()
        first = next(batches, None)


def _batches(path: str | Path, whole: bool) -> Iterator[pa.RecordBatch]:
    with open_parquet(path, whole) as file:
        yield from file.iter_batches(ROWS_AT_A_TIME)
