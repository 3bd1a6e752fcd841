"""Compatibility with verl: import path of `verl.algos.log_prob_metrics`."""

import sys

from verl.algos import log_prob_metrics

sys.modules[__name__] = log_prob_metrics
