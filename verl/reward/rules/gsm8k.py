"""Exact match of the final number, for GSM8K."""

import re
from typing import Any

from verl.reward.rules.math_reward import same_number

_NUMBER = r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+"
_FINAL = re.compile(rf"####\s*\$?\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)
# A repetitive answer may be very long; its last characters hold the final number.
_TAIL = 300


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The final number as text, without thousands separators; None when there is none.

    `strict`: the last number after '####'; `flexible`: the last number in the text.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r} is unknown. Known: strict, flexible.")
    numbers = (_FINAL if method == "strict" else _ANY).findall(solution_str[-_TAIL:])
    return numbers[-1].replace(",", "") if numbers else None


def compute_score(
    solution_str: str, ground_truth: str | float, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right final number, `format_score` for a wrong one, 0 without a number."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if same_number(answer, plain_number(ground_truth)) else format_score


def plain_number(truth: Any) -> str:
    """A ground truth as text, without spaces around it and thousands separators."""
    return str(truth).strip().replace(",", "")
