"""Rows of the pretrained pair's demos, from records as their commands write them.

Not covered: the demos (tests/examples).
"""

import pytest

from benchmarks import pretrained_dllm, pretrained_spd
from benchmarks.harness import Row


def test_gains_of_the_scorer_are_means_over_its_seeds():
    seeds = {
        str(seed): {"questions": 1000, **{f"spd_gain_over_{name}": gain for name in ("best_rule", "exact")},
                    **{f"spd_gain_over_{name}_95": [gain - 0.1, gain + 0.1] for name in ("best_rule", "exact")}}
        for seed, gain in ((0, 1.0), (1, 1.2), (2, 1.5))
    }  # fmt: skip
    for gained, name in zip(pretrained_spd.gained(seeds), ("best_rule", "exact"), strict=True):
        assert (gained.name, gained.low, gained.high) == (f"spd_gain_over_{name}", 1.0, 1.5)
        assert gained.value == pytest.approx(3.7 / 3) and gained.unit.endswith("0.90-1.10, 1.10-1.30, 1.40-1.60")
        assert "a drop of 2 points, 1000 questions" in gained.unit


def test_served_scorers_have_a_row_for_each_number_of_requests():
    def record(*ratios):
        of_model = {f"spd_served_over_{name}": {"1": one, "4": four}
                    for name, (one, four) in zip(("exact", "greedy"), ratios, strict=True)}  # fmt: skip
        return {"questions": 48, "dtype": "float32", "ratios": {"model": of_model, "n-gram": {}}}

    rows = pretrained_spd.served_rows([record((1.5, 1.25), (3, 2)), record((1.25, 1), (2.5, 1.5))])
    assert {row.name: row.value for row in rows} == {
        "spd_served_over_exact": 1.375, "spd_served_over_exact_4": 1.125,
        "spd_served_over_greedy": 2.75, "spd_served_over_greedy_4": 1.75,
    }  # fmt: skip


def test_refinement_has_a_row_for_each_figure():
    ways = {"refined": {"tokens_per_second": 30.0}, "n-gram": {"tokens_per_second": 15.0}}
    result = {
        "dllm_tokens_per_forward": 2.5, "mode": "verify", "gap": {"difference": -1.0}, "questions": 240,
        "aup": {"refined": 50.0, "twin": 40.0}, "dllm_served_over_greedy": 1.75, "served": {"results": ways},
        "training_seconds": 900.0,
    }  # fmt: skip
    rows = pretrained_dllm.measured({"0": result, "1": {**result, "dllm_tokens_per_forward": 3.5, "mode": "slide"}})
    values = {row.name.removeprefix("dllm_"): row.value for row in rows}
    assert values == {
        "tokens_per_forward": 3.0, "accuracy_gap": -1.0, "aup_refined": 50.0, "aup_twin": 40.0,
        "served_over_greedy": 1.75, "served_over_ngram": 2.0, "training_seconds": 900.0,
    }  # fmt: skip
    assert rows[0] == Row("dllm_tokens_per_forward", 3.0, "tokens, lossless, 240 questions; verify, slide", 2.5, 3.5, 2)
