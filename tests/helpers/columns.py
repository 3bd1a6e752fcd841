"""Columns of Python objects for a DataProto."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl.protocol.serialization import object_array


def object_columns(**columns: Sequence[Any]) -> dict[str, np.ndarray]:
    """Object arrays of one dimension, also where the values are lists of one length."""
    return {name: object_array(values) for name, values in columns.items()}
