"""Compatibility with verl: import path of `verl.reward.rules`."""
# ruff: noqa: F401

from verl.reward.rules import default_compute_score, has_rule, known_sources, nearest, truth_problem, unknown_source
from verl.utils.import_utils import deprecated
