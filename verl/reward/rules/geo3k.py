"""Geometry3K: a thought in <think> tags, then a boxed answer."""

from verl.reward.rules.math_reward import boxed_answer
from verl.reward.rules.math_verify import is_equal

_FORMAT = ("<think>", "</think>", "\\boxed{", "}")


def format_reward(predict_str: str) -> float:
    """1.0 for a text that starts with a <think> part and has a boxed answer after it."""
    rest = predict_str
    for mark in _FORMAT:  # a regular expression with four gaps takes minutes on a text of tags
        _, separator, rest = rest.partition(mark)
        if not separator:
            return 0.0
    return float(predict_str.startswith(_FORMAT[0]))


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """1.0 when the boxed answer (or the full text) equals the ground truth."""
    answer = boxed_answer(predict_str) if use_boxed else predict_str
    return float(answer is not None and is_equal(answer, ground_truth))


def compute_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """(1 - format_score) * acc_reward + format_score * format_reward."""
    right = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * right + format_score * format_reward(predict_str)
