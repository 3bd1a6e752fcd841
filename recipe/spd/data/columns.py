"""Drafted blocks in columns: an Arrow table instead of one Python object for each number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl.data.parquet import open_parquet
from verl.data.rl_dataset import read_rows

ROWS_AT_A_TIME = 2048  # read, checked or written together


@dataclass(frozen=True)
class Lists:
    """N lists of integers: all their values in a row [sum of lengths] int32, and their lengths [N] int64."""

    values: np.ndarray
    lengths: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """Where each list begins in `values`, [N]."""
        return self.lengths.cumsum() - self.lengths

    @classmethod
    def of(cls, column: pa.Array) -> Lists:
        """A column of lists of integers. Raises ValueError for another type, a null, or a value outside of int32."""
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise ValueError(f"{column.type} is no list")
        values = column.flatten()
        if column.null_count or values.null_count or not pa.types.is_integer(values.type):
            raise ValueError(f"{column.type} holds nulls, or values that are no integers")
        lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
        return cls(values.cast(pa.int32()).to_numpy(zero_copy_only=False), lengths)

    def within(self, limit: int) -> bool:
        """Whether no list is empty and every value lies in 0 to limit - 1."""
        return (
            bool(self.lengths.all()) and bool(self.values.size) and 0 <= self.values.min() <= self.values.max() < limit
        )


def joined(parts: Sequence[Lists], separators: np.ndarray | int) -> Lists:
    """Of each row the parts in order, each followed by the row's separator (an id, or [N])."""
    lengths = sum(part.lengths for part in parts) + len(parts)
    place = lengths.cumsum() - lengths
    values = np.empty(int(lengths.sum()), dtype=np.int32)
    for part in parts:
        values[np.repeat(place - part.starts, part.lengths) + np.arange(part.values.size)] = part.values
        place = place + part.lengths
        values[place] = separators
        place = place + 1
    return Lists(values, lengths)


class TableRows(Sequence):
    """The rows of an Arrow table; each becomes plain Python when it is read, and is not kept."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __len__(self) -> int:
        return self.table.num_rows

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


def read_table_rows(
    path: str | Path, convert: Callable[[pa.RecordBatch], pa.RecordBatch] | None = None
) -> TableRows | list[dict[str, Any]]:
    """The rows of a data file: of parquet in columns, integers in lists as int32, where its types allow that.

    `convert` is called with each part of a table; where it raises, the rows are returned as read. Raises DatasetError
    as `read_rows` does.
    """
    try:
        batches = [_narrow(batch) for batch in _batches(path, whole=True)]
        batches = [convert(batch) for batch in batches] if convert is not None else batches
        return TableRows(pa.Table.from_batches(batches))
    except Exception:  # no parquet, damaged, or with numbers that no token id can be: read_rows says what is wrong
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


def _narrow(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.cast(pa.schema([field.with_type(_narrowed(field.type)) for field in batch.schema]))


def _narrowed(kind: pa.DataType) -> pa.DataType:
    """The type with int32 for the integers of its lists."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_narrowed(field.type)) for field in kind])
    if pa.types.is_list(kind) and pa.types.is_integer(kind.value_type):
        return pa.list_(pa.int32())
    return kind
