"""Reduces the lists of values that ranks and micro-batches collect to one number per metric."""

import re
from typing import Any

import numpy as np

# Full words only: "timing" and "terminated" contain "min" but are averaged.
_MAX = re.compile(r"(?<![a-z])max(?![a-z])|maximum|minmax")
_MIN = re.compile(r"(?<![a-z])min(?![a-z])|minimum")


def reduce_metrics(metrics: dict[str, list[Any]]) -> dict[str, Any]:
    """Reduce every list in place: the maximum for a name with "max", the minimum for one with "min", else the mean.

    An empty list gives NaN.
    """
    for key, values in metrics.items():
        flat = np.asarray(_flatten(values), dtype=np.float64)
        if flat.size == 0:
            metrics[key] = float("nan")
        elif _MAX.search(key):
            metrics[key] = float(flat.max())
        elif _MIN.search(key):
            metrics[key] = float(flat.min())
        else:
            metrics[key] = float(flat.mean())
    return metrics


def _flatten(values: Any) -> list[float]:
    if isinstance(values, list | tuple):
        return [x for value in values for x in _flatten(value)]
    return [float(x) for x in np.ravel(values)] if isinstance(values, np.ndarray) else [float(values)]
