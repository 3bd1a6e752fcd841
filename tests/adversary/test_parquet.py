"""Parquet files of some hundred bytes that would take gigabytes: refused before they are read, wherever data is read.

To add one, append a function that writes it; it must be refused in little memory.
"""

import os
import tracemalloc
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.spd.data.columns import read_table_rows, row_batches
from verl.data import parquet
from verl.data.parquet import EXPANSION, SMALL_BYTES, ParquetTooLarge, open_parquet
from verl.data.rl_dataset import DatasetError, RLHFDataset, read_rows
from verl.data.sft_dataset import SFTDataset

READERS = {
    "rows": read_rows,
    "RL": lambda path: RLHFDataset(str(path), None, {}),
    "SFT": lambda path: SFTDataset(str(path), None, {}),
    "SPD": read_table_rows,
    "SPD blocks": lambda path: list(row_batches(path)),
}
TEXT = "x" * 1_000_000


def constant(rows, value, kind=None):
    """A column with one value, which is stored once."""
    return pa.DictionaryArray.from_arrays(pa.repeat(0, rows).cast(pa.int32()), pa.array([value], kind))


def nested(rows, text):
    """Lists of two messages with the same content."""
    messages = pa.StructArray.from_arrays([constant(2 * rows, "user"), constant(2 * rows, text)], ["role", "content"])
    return pa.ListArray.from_arrays(pa.array(range(0, 2 * rows + 1, 2), pa.int32()), messages)


def mapped(rows, text):
    """Maps of one entry, the text to itself."""
    return pa.MapArray.from_arrays(pa.array(range(rows + 1), pa.int32()), constant(rows, text), constant(rows, text))


BOMBS = {
    "many numbers": {"a": lambda: pa.repeat(1, 10_000_000)},
    "many nulls": {"a": lambda: pa.nulls(20_000_000, pa.int8())},
    "many truths": {"a": lambda: pa.repeat(True, 20_000_000)},
    "many columns": {f"c{i}": lambda: pa.repeat(1, 100_000) for i in range(60)},
    "one long row": {"a": lambda: pa.ListArray.from_arrays([0, 9_000_000], pa.repeat(1, 9_000_000))},
    "a long text": {"a": lambda: pa.array(["x" * 300_000_000])},
    "many short texts": {"prompt": lambda: constant(20_000_000, "x")},
    "a text in each row": {"prompt": lambda: constant(400, TEXT)},
    "bytes in each row": {"prompt": lambda: constant(400, TEXT.encode(), pa.binary())},
    "a text in messages": {"prompt": lambda: nested(200, TEXT)},
    "texts in a map": {"prompt": lambda: mapped(400, TEXT)},
    "fixed bytes": {"a": lambda: constant(400, TEXT.encode(), pa.binary(1_000_000))},
}  # fmt: skip


@pytest.fixture(scope="module")
def bombs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bombs")

    def write(name):
        path = folder / f"{name.replace(' ', '_')}.parquet"
        if not path.exists():
            table = pa.table({column: make() for column, make in BOMBS[name].items()})
            pq.write_table(table, path, compression="zstd", store_schema=False, write_statistics=False)
        return path

    return write


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_file_that_expands_is_refused_before_it_is_read(bombs, bomb, reader):
    path = bombs(bomb)
    assert os.path.getsize(path) * EXPANSION < SMALL_BYTES
    pa.default_memory_pool().release_unused()
    tracemalloc.start()
    before, most = pa.total_allocated_bytes(), pa.default_memory_pool().max_memory()
    with pytest.raises(DatasetError) as caught:
        reader(path)
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The pool's maximum is that since the start of this process, so it is a bound only where it rises.
    rise = max(0, pa.default_memory_pool().max_memory() - max(most, before))
    assert python < 64 << 20 and rise < 128 << 20
    size = os.path.getsize(path)
    assert str(path) in str(caught.value) and f"{size} bytes that expand to at least" in str(caught.value)
    assert "more than 1000 times the file's size" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("bomb", ["many numbers", "a text in each row"])  # refused by metadata, by indices
def test_a_refused_file_is_closed(bombs, bomb):
    path = bombs(bomb)
    with pytest.raises(ParquetTooLarge) as caught:  # whose traceback keeps the local variables
        open_parquet(path)
    opened = {os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}
    assert os.path.realpath(path) not in opened and caught.tb is not None


def test_compressible_data_is_read_as_it_is(tmp_path):
    content = [f"{i} + {i} = " + "the same words again " * 40 for i in range(5000)]
    columns = {"data_source": ["gsm8k"] * 5000, "prompt": [[{"role": "user", "content": text}] for text in content],
               "ids": [[7] * 50] * 5000, "no": pa.nulls(5000, pa.string()), "long": [TEXT[:200]] * 5000}  # fmt: skip
    for compression in ("snappy", "zstd", "gzip"):
        path = tmp_path / f"{compression}.parquet"
        pq.write_table(pa.table(columns), path, compression=compression)
        with open_parquet(path) as file:
            assert file.read().num_rows == 5000
        assert [row["prompt"][0]["content"] for row in read_rows(path)] == content
        assert read_rows(path)[7]["ids"] == [7] * 50


def test_a_file_that_does_not_fit_into_memory_is_refused_unless_it_is_streamed(tmp_path, monkeypatch):
    path, memory = tmp_path / "a.parquet", SimpleNamespace(available=10 << 20)
    pq.write_table(pa.table({"a": [os.urandom(1 << 19).hex() for _ in range(16)]}), path, use_dictionary=False)
    monkeypatch.setattr(parquet, "SMALL_BYTES", 1 << 20)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    with pytest.raises(DatasetError, match=r"a.parquet: .* expand to at least 16 MiB .*10 MiB .* Name a file of"):
        read_rows(path)
    assert sum(len(batch) for batch in row_batches(path)) == 16
    memory.available = 100 << 20
    assert len(read_rows(path)) == 16
