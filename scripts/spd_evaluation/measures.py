"""The measures of a speculative-decoding rule, and the choice of a scorer's threshold.

Accuracies, drops and shares are fractions (a drop of 0.015 is 1.5 points); a positive drop is a loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipe.spd.decoder import SpecResult


@dataclass
class EvaluationRow:
    """One rule at one threshold on one set of questions; the field names are the keys of evaluation.json."""

    rule: str
    threshold: float | None  # a scorer's z, a margin's gap, a random rule's share; None where a rule has none
    accuracy: float
    accuracy_se: float
    drop: float  # accuracy of exact match less this rule's, paired on the same questions
    drop_se: float
    accepted_per_forward: float  # draft tokens kept, per target forward
    tokens_per_forward: float  # the target's correction or bonus token too
    output_length_ratio: float  # against the target's own text
    not_terminated: float
    harmless_accepted: float | None  # share of the labelled mismatches accepted; None without a judge
    harmful_accepted: float | None
    seconds: float


def measure(
    rule: str,
    threshold: float | None,
    result: SpecResult,
    correct: Sequence[bool],
    *,
    exact_correct: Sequence[bool],
    target_tokens: int,
) -> EvaluationRow:
    """Put one run into numbers.

    `correct` and `exact_correct` hold one entry a question, in one order; `target_tokens` is the length of all of the
    target's own answers. The shares of labelled mismatches are filled in later, for all rules at once.
    """
    if not len(correct) == len(exact_correct) == len(result.tokens) > 1:
        raise ValueError(
            f"{rule}: {len(result.tokens)} answers, {len(correct)} checks, {len(exact_correct)} checks of exact match; "
            "expected equal numbers of at least 2"
        )
    accuracy, accuracy_se = mean_and_error([float(c) for c in correct])
    drop, drop_se = mean_and_error([float(e) - float(c) for e, c in zip(exact_correct, correct, strict=True)])
    rounds = sum(result.rounds)
    tokens = sum(len(answer) for answer in result.tokens)
    return EvaluationRow(
        rule=rule,
        threshold=threshold,
        accuracy=accuracy,
        accuracy_se=accuracy_se,
        drop=drop,
        drop_se=drop_se,
        accepted_per_forward=sum(result.accepted) / rounds,
        tokens_per_forward=tokens / rounds,
        output_length_ratio=tokens / target_tokens,
        not_terminated=1.0 - sum(result.finished) / len(result.finished),
        harmless_accepted=None,
        harmful_accepted=None,
        seconds=result.seconds,
    )


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error (sample variance over n)."""
    n = len(values)
    mean = sum(values) / n
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)


def accepted_share(result: SpecResult) -> float:
    """Share of the judged mismatches that the judge accepted."""
    judged = sum(result.judged_mismatches)
    return sum(result.accepted_mismatches) / judged if judged else 0.0


def choose_threshold(rows: Sequence[EvaluationRow], max_drop: float) -> EvaluationRow:
    """The fastest row whose drop is at most `max_drop` at the upper end of its 95 % interval; without one, that of the
    lowest end.

    To be called with rows of the validation split. Drops are paired with exact match on the same questions.
    """
    if not rows:
        raise ValueError("no validation rows to choose a threshold from; give at least one scorer threshold")
    highest = {id(row): row.drop + 1.96 * row.drop_se for row in rows}
    good = [row for row in rows if highest[id(row)] <= max_drop]
    if good:
        return max(good, key=lambda row: (row.accepted_per_forward, -row.drop))
    return min(rows, key=lambda row: (highest[id(row)], -row.accepted_per_forward))


def accuracy_on_curve(rows: Sequence[EvaluationRow], accepted_per_forward: float) -> float | None:
    """Accuracy of a swept rule at a given speed, straight lines between its points; None outside of its range."""
    points = sorted((row.accepted_per_forward, row.accuracy) for row in rows)
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x0 <= accepted_per_forward <= x1:
            part = (accepted_per_forward - x0) / (x1 - x0) if x1 > x0 else 0.0
            return y0 + part * (y1 - y0)
    return None
