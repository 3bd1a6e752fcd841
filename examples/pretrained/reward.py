"""Reward of the questions: what reasoning-gym's verifier gives for the text after `Answer: `, 0 without such a line."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from examples.pretrained.questions import answer_of


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    """score: the verifier's, in [0, 1]; acc: 1.0 if it is 1, else 0.0; answered: whether the format is the asked one.

    `data_source` names the dataset of reasoning-gym; extra_info["entry"] is its item as json.
    """
    answer = answer_of(solution_str)
    score = 0.0 if answer is None else float(verifier(data_source)(answer, json.loads(extra_info["entry"])))
    return {"score": score, "acc": float(score >= 1.0), "answered": float(answer is not None)}


@cache
def verifier(data_source: str) -> Callable[[str, dict[str, Any]], float]:
    """What scores an answer to an item of a dataset."""
    from reasoning_gym import get_score_answer_fn  # requirements/pretrained.txt

    return get_score_answer_fn(data_source)
