"""Opens parquet files unless they expand to far more memory than their size suggests."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

EXPANSION = 1000  # largest ratio of expanded size to file size; that of ordinary text is about 20
SMALL_BYTES = 256 << 20  # a file that expands to less is never refused
_VALUE_BYTES = 64  # minimum size of a number or string as a Python object
_ROWS = 2048  # largest batch that is read to measure dictionary-encoded columns


class ParquetTooLarge(ValueError):
    """A parquet file expands too much in relation to its size, or does not fit into memory."""


def open_parquet(path: str | Path, whole: bool = True) -> pq.ParquetFile:
    """Open a parquet file; page checksums are verified when rows are read.

    Raises ParquetTooLarge based on the metadata, before rows are read. Only for dictionary-encoded strings, whose size
    the metadata does not state, the indices are read. `whole`: the caller reads all rows into memory, so the expanded
    size must not exceed the available memory.
    """
    import pyarrow.parquet as pq

    path = Path(path).expanduser()
    with contextlib.ExitStack() as refused:  # closes the file unless it is returned
        # pre_buffer reads ahead: 100,000 rows of token ids took a third more memory.
        file = refused.enter_context(pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False))
        values = in_arrow = in_python = 0
        repeating: dict[str, int] = {}  # column of dictionary-encoded strings -> bytes of a chunk
        for group, column in itertools.product(range(file.metadata.num_row_groups), range(file.metadata.num_columns)):
            chunk = file.metadata.row_group(group).column(column)
            width = file.schema.column(column).length or 0  # bytes of a value; 0 where they differ
            size = chunk.total_uncompressed_size
            values += chunk.num_values
            in_arrow += size
            in_python += chunk.num_values * max(_VALUE_BYTES, width)
            # The metadata allows that each value of such a chunk is as long as the whole chunk.
            has_dictionary = not set(chunk.encodings) <= {"PLAIN", "RLE", "BIT_PACKED"}
            if chunk.physical_type == "BYTE_ARRAY" and has_dictionary and chunk.num_values * size > SMALL_BYTES:
                repeating[chunk.path_in_schema] = size
        rows = f"{file.metadata.num_rows} rows of {file.metadata.num_columns} columns, {values} values"
        _check_size(path, rows, whole, in_arrow, in_python)
        if repeating:
            _check_strings(path, rows, whole, in_arrow, repeating)
        refused.pop_all()
    return file


def _check_size(path: Path, rows: str, whole: bool, in_arrow: int, in_python: int = 0) -> None:
    """Raise ParquetTooLarge if the rows take too many bytes in Arrow or as Python objects; `rows` describes them."""
    size = os.path.getsize(path)
    expanded = max(in_arrow, in_python)
    if expanded <= SMALL_BYTES:
        return
    expands = f"{size} bytes that expand to at least {expanded >> 20} MiB ({rows})"
    if expanded > EXPANSION * size:
        raise ParquetTooLarge(
            f"{expands}, more than {EXPANSION} times the file's size. No ordinary data does: make sure where the file "
            "is from. If its rows are right, write them as .jsonl."
        )
    if whole and in_arrow > (free := psutil.virtual_memory().available):
        raise ParquetTooLarge(f"{expands}, and {free >> 20} MiB of memory are available. Name a file of fewer rows.")


def _check_strings(path: Path, rows: str, whole: bool, in_arrow: int, columns: dict[str, int]) -> None:
    """`_check_size` with the decoded strings of `columns` (name -> bytes of a chunk) added, of which indices are read.

    Even if all its strings are as long as a chunk, a batch has no more than a quarter of SMALL_BYTES in a column.
    """
    import pyarrow.parquet as pq

    at_once = max(1, min(_ROWS, SMALL_BYTES // 4 // max(columns.values())))
    with pq.ParquetFile(path, read_dictionary=list(columns), page_checksum_verification=True) as file:
        for batch in file.iter_batches(at_once, columns=list(columns)):
            in_arrow += sum(map(_decoded_bytes, batch.columns))
            _check_size(path, rows, whole, in_arrow)


def _decoded_bytes(array: pa.Array) -> int:
    """Bytes of a column's dictionary-encoded strings when decoded; such arrays may be inside lists and structs."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(array.type):
        lengths: Any = pc.binary_length(array.dictionary)
        return pc.sum(lengths.take(array.indices)).as_py() or 0
    if pa.types.is_struct(array.type):
        return sum(_decoded_bytes(array.field(i)) for i in range(array.type.num_fields))
    return _decoded_bytes(array.values) if pa.types.is_nested(array.type) else 0  # a map is a list of structs
