"""Accepted draft tokens of the best scorer over those of the best rule without training, at an equal drop."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from examples.spd_arithmetic.frontier import TRAINED
from scripts.spd_evaluation.curves import Point, speed_at
from scripts.spd_evaluation.plot import CURVES

DROP = 0.02  # of accuracy against exact match, paired
RESAMPLES, SEED = 1000, 0

Runs = Sequence[Mapping[str, Any]]
"""The runs of a split in by_question.json."""
Curves = dict[str, dict[float | None, Point]]


def curves(runs: Runs, chosen: Sequence[int] | None = None) -> Curves:
    """Legend -> threshold -> point over these questions (None: all); exact match is a point (None) of all curves."""
    exact = next(run for run in runs if run["rule"] == "exact")
    chosen = range(len(exact["correct"])) if chosen is None else chosen

    def point(run: Mapping[str, Any]) -> Point:
        lost = sum(exact["correct"][i] - run["correct"][i] for i in chosen)
        return Point(lost / len(chosen), *(sum(run[name][i] for i in chosen) for name in ("accepted", "rounds")))

    start = {None: point(exact)}
    return {
        legend: start | {run["threshold"]: point(run) for run in runs if run["rule"] in rules}
        for rules, legend, *_ in CURVES if any(run["rule"] in rules for run in runs)
    }  # fmt: skip


def best(validation: Runs, trained: bool, drop: float = DROP) -> str:
    """The legend of the scorer (`trained`) or the rule that accepts the most draft tokens at this drop."""
    known = {legend: speed_at(curve, drop) for legend, curve in curves(validation).items()}
    return max((legend for legend in known if (legend in TRAINED) == trained), key=known.get)


def gains(record: Mapping[str, Runs], drop: float = DROP, resamples: int = RESAMPLES) -> dict[str, Any]:
    """The best scorer and the best rule by validation questions, and what they accept on test questions at this drop.

    `spd_gain_over_best_rule` and `spd_gain_over_exact` with 95 % intervals, for which test questions are resampled:
    every curve sees the same ones.
    """
    scorer, rule = (best(record["validation"], trained, drop) for trained in (True, False))

    def on_test(chosen: Sequence[int] | None = None) -> tuple[float, float, float]:
        test = curves(record["test"], chosen)
        return speed_at(test[scorer], drop), speed_at(test[rule], drop), test[rule][None].speed

    of_scorer, of_rule, exact = on_test()
    draw, count = random.Random(SEED), len(record["test"][0]["correct"])
    drawn = [on_test(draw.choices(range(count), k=count)) for _ in range(resamples)]
    return {
        "drop": drop, "questions": count, "scorer": scorer, "rule": rule, "accepted": {
            "scorer": of_scorer, "rule": of_rule, "exact": exact,
        },
        "spd_gain_over_best_rule": of_scorer / of_rule,
        "spd_gain_over_best_rule_95": interval([s / r for s, r, _ in drawn]),
        "spd_gain_over_exact": of_scorer / exact,
        "spd_gain_over_exact_95": interval([s / e for s, _, e in drawn]),
    }  # fmt: skip


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The middle 95 %."""
    ordered = sorted(values)
    return ordered[int(0.025 * len(ordered))], ordered[int(0.975 * len(ordered))]
