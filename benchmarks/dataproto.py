"""Cost of DataProto's verbs on 1024 x 4096 with 10 tensor columns."""

from __future__ import annotations

import pickle

import numpy as np
import torch

from benchmarks.harness import Row, alternate, row
from verl import DataProto

ROWS, WIDTH, COLUMNS = 1024, 4096, 10


def run() -> list[Row]:
    """dataproto_* in milliseconds, and the bytes of a pickle over those of its arrays."""
    tensors = {f"t{i}": torch.zeros(ROWS, WIDTH, dtype=torch.float32) for i in range(COLUMNS)}
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array([str(i) for i in range(ROWS)], object)})
    other = DataProto.from_dict(tensors={"more": torch.zeros(ROWS, WIDTH)})
    parts = data.chunk(8)
    small = data.slice(0, 256)
    works = {
        "chunk": lambda: data.chunk(8),
        "concat": lambda: DataProto.concat(parts),
        "select": lambda: data.select(batch_keys=["t0", "t1"]),
        "repeat": lambda: small.repeat(4),
        "union": lambda: data.select().union(other),
        "pickle": lambda: pickle.dumps(small, protocol=5, buffer_callback=lambda buffer: None),
    }
    rows = [row(f"dataproto_{k}", [1000 * s for s in v], "ms") for k, v in alternate(works, repetitions=5).items()]
    arrays = sum(t.numel() * t.element_size() for t in small.batch.values())
    return [*rows, row("dataproto_pickle_bytes", [len(pickle.dumps(small, protocol=5)) / arrays], "of its arrays")]
