"""Cost of DataProto's verbs on 1024 x 4096 with 10 tensor columns."""

import pickle
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.harness import Row, alternate, resident_bytes, restart_peak, row
from verl import DataProto

ROWS, WIDTH, COLUMNS, CHUNKS, TIMES = 1024, 4096, 10, 8, 4
REPETITIONS = 5


def verbs() -> dict[str, Callable[[], object]]:
    """What is measured; the tensors are float32, with a column of texts."""
    tensors = {f"t{i}": torch.zeros(ROWS, WIDTH) for i in range(COLUMNS)}
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array([str(i) for i in range(ROWS)], object)})
    other = DataProto.from_dict(tensors={"more": torch.zeros(ROWS, WIDTH)})
    parts = data.chunk(CHUNKS)
    return {
        "chunk": lambda: data.chunk(CHUNKS),
        "concat": lambda: DataProto.concat(parts),
        "select": lambda: data.select(batch_keys=["t0", "t1"]),
        "repeat": lambda: data.repeat(TIMES),
        "union": lambda: data.select().union(other),  # union changes its left side
        "pickle": lambda: pickle.dumps(data, protocol=5),  # in one piece, the arrays in it
    }


def new_bytes(work: Callable[[], object]) -> float:
    """Peak of the process's memory while `work` runs, above what it held before."""
    restart_peak()
    before = resident_bytes()
    work()
    return float(resident_bytes(peak=True) - before)


def run() -> list[Row]:
    """dataproto_* in milliseconds, dataproto_*_bytes; the length of the pickle over the arrays in it."""
    works = verbs()
    rows = []
    for name, seconds in alternate(works, REPETITIONS).items():
        rows.append(row(f"dataproto_{name}", [1000 * s for s in seconds], "ms"))
        peaks = [new_bytes(works[name]) for _ in range(REPETITIONS)]
        rows.append(row(f"dataproto_{name}_bytes", peaks, "bytes, peak"))
    arrays = ROWS * WIDTH * COLUMNS * torch.float32.itemsize
    return [*rows, row("dataproto_pickle_length", [len(works["pickle"]()) / arrays], "of its arrays")]
