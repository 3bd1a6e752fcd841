"""Compares rules and scorers at an equal drop; between two thresholds, each question uses one of them at random."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scripts.spd_evaluation.measures import EvaluationRow
from scripts.spd_evaluation.plot import curves_in


@dataclass(frozen=True)
class Point:
    """A rule at one threshold, or a coin for each question between two: then every field is the mean of both."""

    drop: float
    accepted: float  # draft tokens per token of the target's own answers
    forwards: float  # of the target, per token of its own answers

    @property
    def speed(self) -> float:
        """Accepted draft tokens per target forward, a ratio of sums: between two thresholds it is no straight line."""
        return self.accepted / self.forwards


def point_of(row: EvaluationRow) -> Point:
    """The sums behind a row."""
    forwards = row.output_length_ratio / row.tokens_per_forward
    return Point(row.drop, row.accepted_per_forward * forwards, forwards)


def mixed(low: Point, high: Point, part: float) -> Point:
    """`part` of the questions by `high`, the others by `low`."""
    pairs = zip(vars(low).values(), vars(high).values(), strict=True)
    return Point(*((1 - part) * a + part * b for a, b in pairs))


def curves_of(rows: Sequence[EvaluationRow]) -> dict[str, dict[float | None, Point]]:
    """Legend -> threshold -> point of each swept rule; exact match is a point (None) of all of them."""
    exact = point_of(next(row for row in rows if row.rule == "exact"))
    return {
        legend: {None: exact, **{row.threshold: point_of(row) for row in rows if row.rule in rules}}
        for rules, legend, *_ in curves_in(row.rule for row in rows) if any(row.rule in rules for row in rows)
    }  # fmt: skip


def best_mix(
    curve: dict[float | None, Point], drop: float, value: Callable[[Point], float]
) -> tuple[float | None, float | None, float]:
    """The two thresholds of a curve, and the share of questions for the second, with the largest value at a drop of at
    most `drop`. The best mix lies at one threshold or at the drop: values are monotone between two thresholds.
    """
    choices = [(value(point), (key, key, 0.0)) for key, point in curve.items() if point.drop <= drop]
    for (low, a), (high, b) in itertools.permutations(curve.items(), 2):
        if a.drop < drop < b.drop:
            part = (drop - a.drop) / (b.drop - a.drop)
            choices.append((value(mixed(a, b, part)), (low, high, part)))
    return max(choices, key=lambda choice: choice[0])[1]


def speed_at(curve: dict[float | None, Point], drop: float) -> float:
    """Most accepted draft tokens per target forward with at most this drop."""
    low, high, part = best_mix(curve, drop, speed)
    return mixed(curve[low], curve[high], part).speed


def speed(point: Point) -> float:
    """Accepted draft tokens per target forward."""
    return point.speed


def fewest(point: Point) -> float:
    """Larger for fewer target forwards."""
    return -point.forwards
