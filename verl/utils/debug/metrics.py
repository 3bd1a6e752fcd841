"""Compatibility with verl: import path of `verl.algos.log_prob_metrics`."""

from verl.algos.log_prob_metrics import *  # noqa: F403
