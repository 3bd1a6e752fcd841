"""Reward of an answer to a question of GSM8K: whether the number after the last marker is right."""

import re
from collections.abc import Mapping
from typing import Any

from verl.reward.rules.gsm8k import extract_solution, plain_number
from verl.reward.rules.math_reward import same_number

_NUMBER = re.compile(r"[\s*_:$`\\(]*(-?\d[\d,]*(?:\.\d+)?)")  # after signs of Markdown, TeX and currency


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> dict[str, Any]:
    """score and acc: 1.0 if the number after the last marker is right, else 0.0; last_number: the same of the last
    number of the text, whatever its format; answered: whether a number follows the marker; pred: that number or None.

    The marker is `extra_info["marker"]`, or ####.
    """
    marked = number_after(extra_info.get("marker", "####"), solution_str)
    last = extract_solution(solution_str, method="flexible")
    right, last_right = (float(number is not None and same_number(number, plain_number(ground_truth)))
                         for number in (marked, last))  # fmt: skip
    return {"score": right, "acc": right, "last_number": last_right, "answered": float(marked is not None),
            "pred": marked}  # fmt: skip


def number_after(marker: str, text: str) -> str | None:
    """The number that directly follows the last marker, upper or lower case, without thousands separators."""
    _, found, after = text.lower().rpartition(marker.lower())
    match = _NUMBER.match(after) if found else None
    return match and match[1].replace(",", "")
