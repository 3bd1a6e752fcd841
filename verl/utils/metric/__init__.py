"""Reduction of the workers' metrics."""

from verl.utils.metric.utils import reduce_metrics

__all__ = ["reduce_metrics"]
