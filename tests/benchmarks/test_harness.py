"""What the benchmarks' figures rest on: order of runs, peak memory, bounds, and the reading of a run's metrics.

Not covered: the results themselves; `make bench` prints each next to its bound.
"""

import pytest
import torch

from benchmarks import spd
from benchmarks.harness import alternate, resident_bytes, restart_peak, row, verdict


def test_variants_run_in_turn_and_the_first_round_is_not_counted():
    calls = []
    ways = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    seconds = alternate(ways, 2, lambda: calls.append("rest"))
    assert calls == ["rest", "a", "rest", "b"] * 3
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}


def test_a_row_has_the_median_and_the_range():
    made = row("x", [3.0, 1.0, 2.0, 9.0, 4.0], "s")
    assert (made.value, made.low, made.high, made.repetitions) == (3.0, 1.0, 9.0, 5)


def test_the_peak_counts_what_was_freed_again_and_starts_anew():
    block = 64 * 2**20
    for _ in range(2):  # the second time after a restart
        restart_peak()
        before = resident_bytes()
        torch.ones(block // 4)  # freed at once
        assert resident_bytes(peak=True) - before == pytest.approx(block, rel=0.1)
        restart_peak()  # a block that a long-lived heap has kept goes back too
        assert resident_bytes() - before < block / 2


@pytest.mark.parametrize(
    ("bound", "value", "text"),
    [
        (("at least", 5), 5.0, "at least 5: met"), (("at least", 5), 4.9, "at least 5: MISSED"),
        (("at most", 0.3), 0.3, "at most 0.3: met"), (("at most", 0.3), 0.31, "at most 0.3: MISSED"),
        (None, 1.0, ""),
    ],
)  # fmt: skip
def test_a_bound_is_met_or_missed(bound, value, text):
    assert verdict(value, bound) == text


def test_a_step_of_a_scorer_is_measured_both_ways(monkeypatch):
    for name, value in {"PROMPTS": 2, "N": 2, "REPETITIONS": 1}.items():
        monkeypatch.setattr(spd, name, value)
    rows = {made.name: made.value for made in spd.run()}
    assert rows["spd_step_gradient_difference"] <= 1e-5 and rows["spd_step_speedup"] > 0
