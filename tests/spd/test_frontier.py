"""Pooling over seeds and the speed at a given drop, by hand."""

import json
import math
import sys
from dataclasses import asdict

import pytest

from examples.spd_arithmetic import frontier
from examples.spd_arithmetic.frontier import SCORER, compare, pool, speed_at, verdicts
from scripts.spd_evaluation.measures import EvaluationRow


def row(rule: str, threshold: float | None, drop: float, speed: float, error: float = 0.003) -> EvaluationRow:
    return EvaluationRow(rule, threshold, 0.98 - drop, error, drop, error, speed, speed + 1, 1.0, 0.0, None, None, 1.0)


def test_seeds_are_averaged_where_all_of_them_have_the_threshold():
    first = [row("exact", None, 0.0, 2.0), row("margin", 3.0, 0.01, 3.0, 0.004), row("scorer", 0.0, 0.0, 5.0),
             row("random", 0.7, 0.4, 4.0), row("margin", 4.0, 0.0, 1.0)]
    second = [row("exact", None, 0.0, 2.2), row("margin", 3.0, 0.02, 4.0, 0.003), row("scorer_sweep", 0.0, 0.01, 6.0),
              row("random", 0.8, 0.5, 5.0)]
    pooled = {(r.rule, r.threshold): r for r in pool([first, second])}
    assert set(pooled) == {("exact", None), ("margin", 3.0), ("scorer_sweep", 0.0), ("random", 0.75)}
    margin = pooled["margin", 3.0]
    assert margin.drop == pytest.approx(0.015) and margin.accepted_per_forward == pytest.approx(3.5)
    assert margin.drop_se == pytest.approx(0.0025)  # sqrt(.004^2 + .003^2) / 2
    assert margin.harmless_accepted is None


def test_speed_at_a_drop_lies_on_the_straight_line_between_thresholds():
    curve = [row("exact", None, 0.0, 2.0), row("margin", 3.0, 0.01, 4.0, 0.004), row("margin", 4.0, 0.03, 6.0)]
    assert speed_at(curve, 0.0) == (2.0, 0.003)
    assert speed_at(curve, 0.005) == pytest.approx((3.0, 0.004))
    assert speed_at(curve, 0.02) == pytest.approx((5.0, 0.004))
    assert speed_at(curve, 0.5)[0] == 6.0
    assert speed_at(curve[1:], 0.001)[0] == -math.inf
    # A slow threshold between two others does not bind: the coin may pass it by.
    dented = [*curve[:1], row("margin", 3.5, 0.005, 2.1), *curve[2:]]
    assert speed_at(dented, 0.015)[0] == pytest.approx(4.0)
    # A curve that falls and rises again: the faster point within the drop counts.
    bent = [row("exact", None, 0.0, 2.0), row("scorer", 2.0, 0.02, 3.0), row("scorer", 0.0, 0.004, 5.0)]
    assert speed_at(bent, 0.004)[0] == 5.0 and speed_at(bent, 0.0)[0] == 2.0


def test_the_best_rule_is_named_next_to_the_scorer():
    rows = [row("exact", None, 0.0, 2.0), row("margin", 3.0, 0.005, 2.5), row("typical", 0.09, 0.005, 3.0),
            row("scorer_sweep", 0.0, 0.005, 4.5)]
    at = {entry["drop"]: entry for entry in compare(rows)}
    assert at[0.005]["scorer"] == 4.5 and at[0.005]["rule"] == 3.0 and at[0.005]["ratio"] == 1.5
    assert "typical" in at[0.005]["best_rule"] and at[0.005]["best_rule"] != SCORER
    assert at[0.0]["ratio"] == 1.0


def test_the_verdicts_name_the_drop_where_the_scorer_is_weakest():
    rows = [row("exact", None, 0.0, 2.0), row("margin", 3.0, 0.005, 3.0), row("divergence", 0.1, 0.02, 6.0),
            row("scorer_sweep", 0.0, 0.004, 4.5)]
    near, everywhere = verdicts(compare(rows))
    assert near.startswith("met: at a drop of 0.5 points 1.50 times")
    assert everywhere.startswith("missed") and "0.75 times, at a drop of 2.0 points (divergence" in everywhere
    rows.append(row("scorer_sweep", -1.0, 0.02, 6.0))
    assert verdicts(compare(rows))[1].startswith("met")


def test_a_measured_seed_is_kept_and_not_measured_again(tmp_path, monkeypatch):
    script = "import json, sys; json.dump(json.loads(sys.argv[2]), open(sys.argv[1], 'w'))"
    measured = []

    def commands(args, seed, softness, out):
        measured.append((seed, softness))
        out.mkdir(parents=True, exist_ok=True)
        rows = [row("exact", None, 0.0, 2.0 + seed), row("scorer_sweep", 0.0, 0.002, 4.0 + seed)]
        text = json.dumps({"rows": [asdict(r) for r in rows]})
        return {"evaluation": [sys.executable, "-c", script, str(out / "evaluation.json"), text]}

    monkeypatch.setattr(frontier, "commands", commands)
    options = ["--softness", "0.2", "--seeds", "0", "1", "--kept", str(tmp_path / "kept"), "--out"]
    assert frontier.main([*options, str(tmp_path / "first")]) == 0 and measured == [(0, 0.2), (1, 0.2)]
    (tmp_path / "kept" / "u0.2-seed1.json").unlink()
    assert frontier.main([*options, str(tmp_path / "second")]) == 0 and measured == [(0, 0.2), (1, 0.2), (1, 0.2)]
    first, second = (json.loads((tmp_path / name / "frontier.json").read_text()) for name in ("first", "second"))
    assert first == second and first["u=0.2"]["rows"][0]["accepted_per_forward"] == 2.5
    assert (tmp_path / "second" / "frontier-u0.2.png").stat().st_size > 10_000
