"""The measures of a speculative-decoding rule, and the choice of a scorer's threshold.

Accuracies, drops and shares are fractions (a drop of 0.015 is 1.5 points); a positive drop is a loss.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipe.spd.rollout.decoder import SpecResult
    from scripts.spd_evaluation.harm import LabelledBlock


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
    seconds: float | None  # None: no model ran
    forwards_per_question: float  # of the target, for one answer


def measure(
    rule: str,
    threshold: float | None,
    result: SpecResult,
    correct: Sequence[bool],
    *,
    exact_correct: Sequence[bool],
    target_tokens: int,
    samples: int = 1,
) -> EvaluationRow:
    """Put one run into numbers.

    `correct` and `exact_correct` hold `samples` entries per question, in one order; errors are between questions.
    `target_tokens` is the length of all of the target's own answers. The shares of labelled mismatches are filled in
    later, for all rules at once.
    """
    if not len(correct) == len(exact_correct) == len(result.tokens) > 1:
        raise ValueError(
            f"{rule}: {len(result.tokens)} answers, {len(correct)} checks, {len(exact_correct)} checks of exact match; "
            "expected equal numbers of at least 2"
        )
    right, exact_right = (
        [sum(values[i : i + samples]) / samples for i in range(0, len(values), samples)]
        for values in (correct, exact_correct)
    )
    accuracy, accuracy_se = mean_and_error(right)
    drop, drop_se = mean_and_error([e - c for e, c in zip(exact_right, right, strict=True)])
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
        forwards_per_question=rounds / len(result.rounds),
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


def ngram_drafts(
    prompts: Sequence[Sequence[int]], own: SpecResult, gamma: int, longest: int = 3, target_first: bool = False
) -> SpecResult:  # fmt: skip
    """Exact match with drafts that continue an earlier occurrence of the last tokens (prompt lookup, Saxena 2023).

    No model runs: exact match gives the target's own text, which `own` holds. The longest n-gram counts, up to
    `longest` tokens, and of those its first occurrence, as in vLLM; a round without one commits the target's token.
    With `target_first` the first round has no draft (see speculative_generate).
    """
    rounds, accepted = [], []
    for prompt, tokens in zip(prompts, own.tokens, strict=True):
        context, done, steps, kept = list(prompt), 0, 0, 0
        while done < len(tokens):
            draft = [] if target_first and not steps else _lookup(context, gamma, longest)
            matches = 0
            while matches < len(draft) and done + matches < len(tokens) and draft[matches] == tokens[done + matches]:
                matches += 1
            taken = tokens[done : done + matches + 1]
            context += taken
            done, steps, kept = done + len(taken), steps + 1, kept + matches
        rounds.append(steps)
        accepted.append(kept)
    return replace(own, rounds=rounds, accepted=accepted)


def _lookup(context: Sequence[int], gamma: int, longest: int) -> Sequence[int]:
    for size in range(min(longest, len(context) - 1), 0, -1):
        suffix = context[-size:]
        for start in range(len(context) - size):
            if context[start : start + size] == suffix:
                return context[start + size : start + size + gamma]
    return []


def choose_threshold(
    rows: Sequence[EvaluationRow], max_drop: float, drops: Sequence[tuple[float, ...]] | None = None
) -> EvaluationRow:
    """The fastest row whose drop is at most `max_drop` at the upper end of its 95 % interval; without one, that of the
    lowest end.

    To be called with rows of the validation split. `drops` (drop, standard error, ...) are estimates in place of the
    rows' own, which are paired with exact match on the same questions.
    """
    if not rows:
        raise ValueError("no validation rows to choose a threshold from; give at least one scorer threshold")
    drops = drops or [(row.drop, row.drop_se) for row in rows]
    upper = [drop + 1.96 * error for drop, error, *_ in drops]
    good = [k for k in range(len(rows)) if upper[k] <= max_drop]
    if good:
        return rows[max(good, key=lambda k: (rows[k].accepted_per_forward, -upper[k]))]
    return rows[min(range(len(rows)), key=lambda k: (upper[k], -rows[k].accepted_per_forward))]


def questions_needed(
    drop: float, error: float, max_drop: float, questions: int, error_of_labels: float = math.inf
) -> int | None:  # fmt: skip
    """Validation questions with which this drop's 95 % interval would end at `max_drop`; None if the drop is above it.

    The standard error of a drop measured on `questions` falls with the root of their number. Where labelled mismatches
    contribute to the estimate (`error_of_labels`, see pooled_drop), their part of its precision stays.
    """
    if drop >= max_drop:
        return None
    fixed = error_of_labels**-2
    return math.ceil(questions * ((1.96 / (max_drop - drop)) ** 2 - fixed) / (error**-2 - fixed))


Labelled = Sequence[Sequence[tuple[float, bool]]]
"""(z, harmful) of the reachable mismatches of each labelled block."""


def harmless_share_and_auc(blocks: Labelled) -> tuple[float, float | None]:
    """The share of harmless ones among the reachable mismatches, and the probability that a harmless one has a larger
    value than a harmful one (ties count half); None where there is only one kind.
    """
    kinds: tuple[list[float], list[float]] = ([], [])
    for value, harmful in (pair for block in blocks for pair in block):
        kinds[harmful].append(value)
    harmless, harms = kinds
    share = len(harmless) / (len(harmless) + len(harms))
    if not harmless or not harms:
        return share, None
    above = sum((value > other) + (value == other) / 2 for value in harmless for other in harms)
    return share, above / (len(harmless) * len(harms))


def accepted_without_error(blocks: Sequence[LabelledBlock]) -> tuple[float, float]:
    """Mean number of draft tokens that exact match accepts of these blocks, and that a judge accepts which knows every
    label: those before the first harmful mismatch. The labels say nothing of blocks without a mismatch.
    """
    exact = sum(min(block.harmful) for block in blocks)
    best = sum(min((at for at, harmful in block.harmful.items() if harmful), default=len(block.draft_ids))
               for block in blocks)  # fmt: skip
    return exact / len(blocks), best / len(blocks)


def spread_thresholds(blocks: Labelled, shares: Sequence[float]) -> list[float]:
    """The thresholds above which these shares of the harmless mismatches lie, largest first: z has another scale in
    each scorer and rule. Each lies halfway between two values that occur, where rules with > and >= agree.
    """
    harmless = sorted((z for block in blocks for z, harmful in block if not harmful), reverse=True)
    if not harmless:
        raise ValueError("no labelled mismatch of the validation blocks is harmless; label more blocks")
    below = {z: (z + larger) / 2 for larger, z in itertools.pairwise(dict.fromkeys(harmless))}
    last = {harmless[min(int(share * len(harmless)), len(harmless) - 1)] for share in shares}
    return sorted((below.get(z, z) for z in last), reverse=True)


def labelled_drop(threshold: float, blocks: Labelled, judged: float) -> tuple[float, float]:
    """The drop at a threshold and its standard error, from the rate of harmful accepts among the labelled mismatches
    that would be judged, times the mismatches `judged` per question.
    """
    seen = broken = 0
    for block in blocks:
        for z, harmful in block:
            seen += 1
            if z <= threshold:
                break
            broken += harmful  # the last reachable mismatch
    rate = (broken + 0.5) / (seen + 1)
    return judged * rate, judged * math.sqrt(rate * (1 - rate) / (seen + 1))


def pooled_drop(row: EvaluationRow, questions: int, judged: int, blocks: Labelled) -> tuple[float, float, float]:
    """Two estimates of the drop at a row's threshold in one, weighted by their precision: (drop, its standard error,
    that of the second estimate alone).

    The first is the row's own, paired on `questions` whole answers; 1 / questions is added in quadrature to its error,
    so that no difference on few questions does not count as certain. The second is `labelled_drop` (`judged`: in all):
    many more events of one kind than answers that happen to break.
    """
    counted = labelled_drop(row.threshold, blocks, judged / questions)
    whole = row.drop, math.hypot(row.drop_se, 1 / questions)
    weights = [1 / error**2 for _, error in (counted, whole)]
    drop = sum(w * d for w, (d, _) in zip(weights, (counted, whole), strict=True)) / sum(weights)
    return drop, 1 / math.sqrt(sum(weights)), counted[1]


def accuracy_on_curve(rows: Sequence[EvaluationRow], accepted_per_forward: float) -> float | None:
    """Accuracy of a swept rule at a given speed; None outside of its range.

    Between two thresholds it is that of a coin for each question between them, which mixes the sums of accepted tokens
    and of forwards.
    """
    points = sorted(rows, key=lambda row: row.accepted_per_forward)
    for low, high in zip(points, points[1:], strict=False):
        if low.accepted_per_forward <= accepted_per_forward <= high.accepted_per_forward:
            # Draft tokens per question by which each threshold misses the wanted speed; the mix misses it by none.
            lacks, exceeds = (
                abs(row.accepted_per_forward - accepted_per_forward) * row.forwards_per_question for row in (low, high)
            )
            part = lacks / (lacks + exceeds) if lacks + exceeds else 0.0
            return (1 - part) * low.accuracy + part * high.accuracy
    return None
