"""Metrics of two runs are compared value by value; durations and memory are left out."""

import json
import math

from scripts.loss_compare import difference, read_metrics


def test_the_largest_difference_and_its_first_position_are_reported():
    old = {(1, "loss"): 0.5, (2, "loss"): 0.25, (2, "lr"): 1e-3}
    new = {(1, "loss"): 0.5, (2, "loss"): 0.375, (2, "lr"): 2e-3, (2, "syncs"): 1}
    assert difference(old, new) == (3, 0.125, [(2, "loss"), (2, "lr")], ["syncs"])
    assert difference(old, old) == (3, 0.0, [], [])


def test_nan_equals_nan_only():
    nan = {(1, "loss"): math.nan}
    assert difference(nan, dict(nan))[:3] == (1, 0.0, [])
    assert difference(nan, {(1, "loss"): 0.0})[1] == math.inf


def test_what_depends_on_the_machine_is_not_compared(tmp_path):
    data = {"actor/pg_loss": 0.1, "timing_s/gen": 3.0, "perf/throughput": 9.0, "train/time(s)": 1.0,
            "spd/store/mib": 2.0}  # fmt: skip
    rows = [{"step": 1, "data": data}, {"step": 2, "data": {"actor/pg_loss": 0.2}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_metrics(tmp_path) == {(1, "actor/pg_loss"): 0.1, (2, "actor/pg_loss"): 0.2}
