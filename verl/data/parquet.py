"""Opens parquet files, except those that would take far more memory than any data of their size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

EXPANSION = 1000  # times the size of the file; text compresses to a twentieth
SMALL_BYTES = 256 << 20  # which every file may take
VALUE_BYTES = 64  # of a number or text in Python, at least
_ROWS = 2048


class ParquetTooLarge(ValueError):
    """A parquet file would expand beyond all proportion to its size, or does not fit into memory."""


def open_parquet(path: str | Path, whole: bool = True) -> pq.ParquetFile:
    """The file, whose pages are checked against their checksums when they are read; `whole`: into memory.

    Raises ParquetTooLarge by what its metadata says, before any row is read. Texts that are stored once, and named by
    number in each row, are measured by reading these numbers.
    """
    import pyarrow.parquet as pq

    path = Path(path).expanduser()
    file = pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False)
    metadata, columns = file.metadata, range(file.metadata.num_columns)
    chunks = [(metadata.row_group(i).column(j), file.schema.column(j).length or 0)
              for i in range(metadata.num_row_groups) for j in columns]  # fmt: skip
    values = sum(chunk.num_values for chunk, _ in chunks)
    stored = sum(chunk.total_uncompressed_size for chunk, _ in chunks)
    size = Size(path, f"{metadata.num_rows} rows of {len(columns)} columns, {values} values", whole)
    size.check(stored, sum(chunk.num_values * max(VALUE_BYTES, width) for chunk, width in chunks))
    # Each of the values may be as long as all texts of its chunk together.
    shared = {chunk.path_in_schema: chunk.total_uncompressed_size for chunk, _ in chunks
              if chunk.physical_type == "BYTE_ARRAY" and not set(chunk.encodings) <= {"PLAIN", "RLE", "BIT_PACKED"}
              and chunk.num_values * chunk.total_uncompressed_size > SMALL_BYTES}  # fmt: skip
    if shared:
        rows = max(1, min(_ROWS, SMALL_BYTES // 4 // max(shared.values())))
        with pq.ParquetFile(path, read_dictionary=list(shared), page_checksum_verification=True) as numbers:
            length = stored
            for batch in numbers.iter_batches(rows, columns=list(shared)):
                length += sum(_length(leaf) for column in batch.columns for leaf in _leaves(column))
                size.check(length)
    return file


@dataclass(frozen=True)
class Size:
    """Whether a size can be that of a file's rows."""

    path: Path
    rows: str
    whole: bool

    def check(self, needed: int, in_python: int = 0) -> None:
        """Raise ParquetTooLarge for too many bytes; `in_python`: what the rows would take as Python objects."""
        size, most = os.path.getsize(self.path), max(needed, in_python)
        if most <= SMALL_BYTES:
            return
        expands = f"{size} bytes that expand to at least {most >> 20} MiB ({self.rows})"
        if most > EXPANSION * size:
            raise ParquetTooLarge(
                f"{expands}, more than {EXPANSION} times the file's size. No ordinary data does: make sure where the "
                "file is from. If its rows are right, write them as .jsonl."
            )
        if self.whole and needed > (free := psutil.virtual_memory().available):
            raise ParquetTooLarge(f"{expands}, and {free >> 20} MiB of memory are available. Use fewer rows.")


def _leaves(array: pa.Array) -> Iterator[pa.DictionaryArray]:
    """The columns of texts within lists and structs."""
    import pyarrow as pa

    if pa.types.is_dictionary(array.type):
        yield array
    elif pa.types.is_struct(array.type):
        for i in range(array.type.num_fields):
            yield from _leaves(array.field(i))
    elif pa.types.is_map(array.type):
        yield from _leaves(array.keys)
        yield from _leaves(array.items)
    elif pa.types.is_nested(array.type):
        yield from _leaves(array.values)


def _length(texts: pa.DictionaryArray) -> int:
    """Bytes of all values."""
    import pyarrow.compute as pc

    lengths: Any = pc.binary_length(texts.dictionary)
    return pc.sum(lengths.take(texts.indices)).as_py() or 0
