"""Mathematical equality of a boxed answer and the ground truth, decided by math-verify."""

from __future__ import annotations

from verl.utils.py_functional import timeout_limit
from verl.utils.reward_score.math_reward import is_equiv, last_boxed_only_string, remove_boxed

_SECONDS = 10.0
_LONGEST = 2000  # characters; a longer answer is no answer


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0) -> float:
    """1.0 when the last boxed answer equals the ground truth, else 0.0; `timeout_score` where that takes over 10 s.

    Decided in a process of its own. `score` does the same in this one, without a limit.
    """
    try:
        return timeout_limit(_SECONDS)(score)(model_output, ground_truth)
    except TimeoutError:
        return float(timeout_score)


def score(model_output: str, ground_truth: str) -> float:
    """1.0 when the last boxed answer equals the ground truth, else 0.0. Without a limit of time."""
    boxed = last_boxed_only_string(model_output)
    return float(boxed is not None and is_equal(remove_boxed(boxed), ground_truth))


def is_equal(answer: str, ground_truth: str) -> bool:
    """Whether two pieces of LaTeX (or plain numbers) mean the same: as text, else as expressions.

    Text goes through math-verify's LaTeX grammar alone, never through sympy's `parse_expr`, which runs Python.
    """
    if is_equiv(answer, ground_truth):
        return True
    if len(answer) > _LONGEST:
        return False
    from math_verify import LatexExtractionConfig, parse, verify

    def read(text: str) -> list:
        # No time limit of its own: that one needs the main thread, and stops no arithmetic in C.
        return parse(f"\\boxed{{{text}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)

    truth = read(str(ground_truth))
    if not truth:
        raise ValueError(f"the ground truth {ground_truth!r} cannot be read as mathematics.")
    return bool(verify(truth, read(answer), timeout_seconds=None))
