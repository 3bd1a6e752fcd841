"""Mixed thresholds, the choice on validation questions and figures over seeds, by hand."""

import json
import math
import sys
from dataclasses import asdict

import pytest

from examples.spd_arithmetic import frontier
from examples.spd_arithmetic.frontier import Seed, compare, seed_figures, verdicts
from scripts.spd_evaluation.curves import Point, best_mix, fewest, mixed, point_of, speed
from scripts.spd_evaluation.measures import EvaluationRow

SCORER, MARGIN = "trained scorer, swept", "margin rule, swept"


def row(rule: str, threshold: float | None, drop: float, speed: float, error: float = 0.003) -> EvaluationRow:
    """Accepted drafts per forward, and one token of the target with them; answers as long as the target's own."""
    of_answer = 60 / (speed + 1)  # forwards for 60 tokens
    values = (0.98 - drop, error, drop, error, speed, speed + 1, 1.0, 0.0, None, None, 1.0, of_answer)
    return EvaluationRow(rule, threshold, *values)


def test_a_coin_between_two_thresholds_mixes_sums_and_no_ratio():
    # 3 and 1 accepted per forward; 4 and 2 tokens, so 1/4 and 1/2 forwards for each token of the target's own.
    fast, slow = point_of(row("margin", 3.0, 0.02, 3.0)), point_of(row("exact", None, 0.0, 1.0))
    assert (fast.forwards, fast.accepted, slow.forwards, slow.accepted) == (0.25, 0.75, 0.5, 0.5)
    half = mixed(slow, fast, 0.5)
    assert half == Point(0.01, 0.625, 0.375)
    assert half.speed == pytest.approx(5 / 3)  # and not the mean of 3 and 1
    curve = {None: slow, 3.0: fast}
    assert best_mix(curve, 0.01, speed) == (None, 3.0, 0.5) and best_mix(curve, 0.02, speed) == (3.0, 3.0, 0.0)
    assert best_mix(curve, 0.0, fewest) == (None, None, 0.0)
    # Longer answers may cost more forwards than their speed saves: the two axes choose differently.
    long = Point(0.0, 1.8, 0.6)
    assert long.speed > slow.speed and best_mix({None: slow, 1.0: long}, 0.0, speed)[0] == 1.0
    assert best_mix({None: slow, 1.0: long}, 0.0, fewest)[0] is None


def seed_of(shift: float = 0.0) -> Seed:
    """On validation questions the lenient thresholds drop 0.5 points; on test questions 1 point more, and `shift`."""
    rows = {}
    for split, more in (("validation", 0.0), ("test", 0.01 + shift)):
        rows[split] = [
            row("exact", None, 0.0, 2.0), row("margin", 3.0, 0.005 + more, 3.0), row("margin", 9.0, 0.5, 7.0),
            row("scorer_sweep", 1.0, 0.0, 4.0), row("scorer", 0.0, 0.005 + more, 5.0 + 100 * shift),
        ]  # fmt: skip
    rows["validation"] = [*rows["validation"][:-1], row("scorer_sweep", 0.0, 0.005, 5.0)]
    return Seed(rows["test"], rows["validation"])


def test_thresholds_are_chosen_on_validation_and_reported_on_test_questions():
    at = {entry["allowed"]: entry for entry in compare([seed_of(), seed_of(0.002)])}
    scorer, margin = (at[0.005]["curves"][legend] for legend in (SCORER, MARGIN))
    assert scorer["drop"] == pytest.approx((0.016, 0.001))  # 1.5 and 1.7 points: half their difference is the error
    assert scorer["speed"] == pytest.approx((5.1, 0.1)) and margin["speed"] == pytest.approx((3.0, 0.0))
    assert scorer["saved"][0] == pytest.approx((6.0 + 6.2) / 2 / 3)  # exact match has 3 tokens per forward
    assert at[0.005]["best_rule"] == MARGIN and at[0.005]["ratio"] == pytest.approx(1.7)
    assert at[0.0]["curves"][SCORER]["speed"][0] == 4.0 and at[0.0]["curves"][SCORER]["drop"][0] == 0.0
    near, everywhere = verdicts(list(at.values()))
    assert near.startswith("met: at a drop of 0.5 points 1.70 times")
    assert everywhere.startswith("met: nowhere fewer") and compare([seed_of()])[0]["ratio"] == 2.0
    assert math.isnan(compare([seed_of()])[0]["curves"][SCORER]["drop"][1])


def test_figures_over_seeds_are_of_the_chosen_thresholds():
    def measured(gain: float, drop: float) -> Seed:
        others = [row(name, 0.0, drop / 2, 3.0) for name in ("supervised", "refined")]
        return Seed([row("exact", None, 0.0, 2.0), row("scorer", 0.0, drop, 2 * gain), *others], [])

    figures = seed_figures([measured(2.0, 0.004), measured(2.5, 0.010)])
    assert figures["seed_gain_min"] == 2.0 and figures["seed_gain_mean"] == 2.25
    assert figures["seed_drop_max"] == pytest.approx(1.0) and figures["seed_drop_mean"] == pytest.approx(0.7)
    assert figures["supervised_gain_min"] == 1.5 and figures["supervised_drop_max"] == pytest.approx(0.5)
    # Gains 2 and 2.5 differ by 0.5: standard error 0.25, times Student's t of one degree of freedom.
    assert figures["seed_gain_ci"] == pytest.approx(12.706 * 0.25)
    assert figures["seed_tokens_per_forward_mean"] == pytest.approx(5.5)  # of 4 and 5 drafts
    assert figures["seed_forwards_mean"] == pytest.approx((3 / 5 + 3 / 6) / 2)


def test_every_phase_of_a_seed_is_done_once_and_a_kept_seed_never_again(tmp_path, monkeypatch):
    log = tmp_path / "ran.txt"
    script = """if True:
        import json, pathlib, sys
        log, name, run, *options = sys.argv[1:]
        open(log, "a").write(" ".join([name, *options]) + chr(10))
        if name == "training":
            asked = [{"spd/completions/asked": 40}, {"x": 1}, {"spd/completions/asked": 2}]
            assert not pathlib.Path(run).exists() and not list(pathlib.Path(run).parent.glob("completions.*"))
            pathlib.Path(run).mkdir()
            lines = [json.dumps({"data": step}) + chr(10) for step in asked]
            pathlib.Path(run, "metrics.jsonl").write_text("".join(lines))
    """
    rows = [row("exact", None, 0.0, 2.0), row("margin", 3.0, 0.005, 3.0)]
    rows += [row(name, 0.0, 0.002, 4.0) for name in frontier.SCORERS]
    swept = [r if r.rule not in frontier.SCORERS else EvaluationRow(**{**asdict(r), "rule": f"{r.rule}_sweep"})
             for r in rows]  # fmt: skip

    def commands(questions, seed, out):
        if not out.exists():  # what a training that was killed leaves
            (out / "run").mkdir(parents=True)
            (out / "completions.sqlite3-wal").write_text("")
        (out / "evaluation.json").write_text(json.dumps({"questions": 9, "rows": [asdict(r) for r in rows]}))
        (out / "validation.json").write_text(json.dumps({"rows": [asdict(r) for r in swept]}))
        names = ("training", "supervised", "evaluation")
        return {name: [sys.executable, "-c", script, str(log), name, str(out / "run")] for name in names}

    monkeypatch.setattr(frontier, "commands", commands)
    options = ["--seeds", "0", "--kept", str(tmp_path / "kept"), "--out", str(tmp_path / "out"),
               "--results", str(tmp_path / "seeds.json")]  # fmt: skip
    assert frontier.main(options) == 0
    assert log.read_text().split("\n")[:3] == ["training", "supervised --label-budget 42", "evaluation"]
    figures = json.loads((tmp_path / "seeds.json").read_text())
    assert figures["seed_gain_min"] == 2.0 and figures["seeds"] == [0]
    name = frontier.NAME
    kept = tmp_path / "kept" / f"{name}-seed0.json"
    record = json.loads(kept.read_text())
    assert set(record) == {"commands", "test", "validation"}
    assert record["commands"]["training"] == ["python", "-c", script, str(log), "training", "OUT/run"]
    row_of_exact = next(r for r in record["test"] if r["rule"] == "exact")
    row_of_exact["accepted_per_forward"] = 1.0
    kept.write_text(json.dumps(record))
    assert frontier.main(options) == 0
    assert json.loads((tmp_path / "seeds.json").read_text())["seed_gain_min"] == 4.0  # read from the kept file
    kept.write_text(json.dumps({**record, "commands": {**record["commands"], "evaluation": ["--questions", "9"]}}))
    assert frontier.main(options) == 0
    assert json.loads((tmp_path / "seeds.json").read_text())["seed_gain_min"] == 2.0  # of other commands: not read
    assert len(log.read_text().splitlines()) == 3  # nothing ran again
    (tmp_path / "out" / f"{name}-seed0" / "commands.json").write_text(json.dumps({}))
    kept.unlink()
    assert frontier.main(options) == 0 and len(log.read_text().splitlines()) == 6
    assert (tmp_path / "out" / f"frontier-{name}.png").stat().st_size > 10_000
