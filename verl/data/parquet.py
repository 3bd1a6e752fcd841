"""Opens parquet files unless they expand to far more memory than their size suggests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
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
        metadata, values, stored, in_python = file.metadata, 0, 0, 0
        encoded: dict[str, int] = {}  # column of dictionary-encoded strings -> bytes of a chunk
        for chunk, width in _chunks(file):
            size = chunk.total_uncompressed_size
            values += chunk.num_values
            stored += size
            in_python += chunk.num_values * max(_VALUE_BYTES, width)
            # Each value of a chunk with a dictionary may be as long as the whole dictionary.
            has_dictionary = not set(chunk.encodings) <= {"PLAIN", "RLE", "BIT_PACKED"}
            if chunk.physical_type == "BYTE_ARRAY" and has_dictionary and chunk.num_values * size > SMALL_BYTES:
                encoded[chunk.path_in_schema] = size
        rows = f"{metadata.num_rows} rows of {metadata.num_columns} columns, {values} values"
        _check_size(path, rows, whole, stored, in_python)
        if encoded:
            at_once = max(1, min(_ROWS, SMALL_BYTES // 4 // max(encoded.values())))
            with pq.ParquetFile(path, read_dictionary=list(encoded), page_checksum_verification=True) as indices:
                length = stored
                for batch in indices.iter_batches(at_once, columns=list(encoded)):
                    length += sum(_length(leaf) for column in batch.columns for leaf in _leaves(column))
                    _check_size(path, rows, whole, length)
        refused.pop_all()
    return file


def _chunks(file: pq.ParquetFile) -> Iterator[tuple[pq.ColumnChunkMetaData, int]]:
    """The metadata of each chunk of a column, and the bytes of a value where all have the same number, else 0."""
    for group in range(file.metadata.num_row_groups):
        for column in range(file.metadata.num_columns):
            yield file.metadata.row_group(group).column(column), file.schema.column(column).length or 0


def _check_size(path: Path, rows: str, whole: bool, needed: int, in_python: int = 0) -> None:
    """Raise ParquetTooLarge if the rows (described by `rows`) take too many bytes in Arrow (`needed`) or in Python."""
    size = os.path.getsize(path)
    expanded = max(needed, in_python)
    if expanded <= SMALL_BYTES:
        return
    expands = f"{size} bytes that expand to at least {expanded >> 20} MiB ({rows})"
    if expanded > EXPANSION * size:
        raise ParquetTooLarge(
            f"{expands}, more than {EXPANSION} times the file's size. No ordinary data does: make sure where the file "
            "is from. If its rows are right, write them as .jsonl."
        )
    if whole and needed > (free := psutil.virtual_memory().available):
        raise ParquetTooLarge(f"{expands}, and {free >> 20} MiB of memory are available. Use fewer rows.")


def _leaves(array: pa.Array) -> Iterator[pa.DictionaryArray]:
    """The dictionary-encoded arrays of a column, also inside lists, maps and structs."""
    import pyarrow as pa

    if pa.types.is_dictionary(array.type):
        yield array
    elif pa.types.is_struct(array.type):
        for i in range(array.type.num_fields):
            yield from _leaves(array.field(i))
    elif pa.types.is_nested(array.type):  # a list, or a map, which is a list of structs
        yield from _leaves(array.values)


def _length(array: pa.DictionaryArray) -> int:
    """Total length of the decoded strings in bytes."""
    import pyarrow.compute as pc

    lengths: Any = pc.binary_length(array.dictionary)
    return pc.sum(lengths.take(array.indices)).as_py() or 0
