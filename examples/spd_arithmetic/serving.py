"""Questions of the test bed put to a served model: accuracy, and the choice of a threshold."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from transformers import AutoTokenizer

from examples.spd_arithmetic.questions import Question
from recipe.spd.rollout.answers import is_correct
from verl.utils.tokenizer import stop_ids

DROP_POINTS = 0.5  # of accuracy on validation questions that a chosen threshold may cost


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """The first `limit` questions of a test bed's file."""
    return [Question(**json.loads(line)) for line in path.read_text().splitlines()[:limit]]


def accuracy(model: str, questions: Sequence[Question], answers: Sequence[Sequence[int]]) -> float:
    """Share of answers (token ids) that have ended and name the right number; `model` is the target's folder."""
    decode, ends = _texts_of(model)
    pairs = zip(questions, answers, strict=True)
    right = [bool(ids) and ids[-1] in ends and is_correct(decode(list(ids)), q.ground_truth) for q, ids in pairs]
    return sum(right) / len(right)


def choose_threshold(exact: float, judged: Mapping[float, float], drop_points: float = DROP_POINTS) -> float:
    """The lowest threshold that costs at most `drop_points` on validation questions; else the most accurate one.

    `exact`, `judged`: accuracy of exact acceptance, and of each threshold.
    """
    kept = [threshold for threshold, right in judged.items() if 100 * (exact - right) <= drop_points + 1e-9]
    return min(kept) if kept else max(judged, key=lambda threshold: (judged[threshold], threshold))


@cache
def _texts_of(model: str):
    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True), frozenset(stop_ids(tokenizer))
