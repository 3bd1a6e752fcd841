"""Geometry3K: a thought in <think> tags, then a boxed answer."""

from __future__ import annotations

import re

from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed
from verl.utils.reward_score.math_verify import is_equal

_FORMAT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def format_reward(predict_str: str) -> float:
    """1.0 when a <think> part and a boxed answer behind it are all there is."""
    return float(_FORMAT.fullmatch(predict_str) is not None)


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """1.0 when the boxed answer (or the whole text) equals the ground truth."""
    answer: str | None = predict_str
    if use_boxed:
        boxed = last_boxed_only_string(predict_str)
        answer = None if boxed is None else remove_boxed(boxed)
    return float(answer is not None and is_equal(answer, ground_truth))


def compute_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """(1 - format_score) * acc_reward + format_score * format_reward."""
    right = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * right + format_score * format_reward(predict_str)
