"""Columns of Python objects for a DataProto."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def object_columns(**columns: Sequence[Any]) -> dict[str, np.ndarray]:
    """Object arrays of one dimension, also where the values are lists of one length."""
    arrays = {name: np.empty(len(values), dtype=object) for name, values in columns.items()}
    for name, values in columns.items():
        arrays[name][:] = list(values)
    return arrays
