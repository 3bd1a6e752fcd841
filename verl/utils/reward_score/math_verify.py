"""Mathematical equality of a boxed answer and the ground truth, decided by math-verify."""

from __future__ import annotations

import functools
import logging
import os
import threading

from loguru import logger

from verl.grading.time_limit import Child, ChildDied
from verl.utils.reward_score.math_reward import boxed_answer, is_equiv

_SECONDS = 10.0
_LONGEST = 2000  # characters; a longer answer is no answer


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0, seconds: float = _SECONDS) -> float:
    """1.0 when the last boxed answer equals the ground truth, else 0.0.

    `timeout_score` where that takes over `seconds`: a hostile answer such as 9^{9^{9^9}} is wrong, and no fault.
    """
    answer = boxed_answer(model_output)
    verdict = False if answer is None else _verdict(answer, str(ground_truth), seconds)
    return float(timeout_score if verdict is None else verdict)


def is_equal(answer: str, ground_truth: str) -> bool:
    """Whether two pieces of LaTeX (or plain numbers) mean the same: as text, else as expressions within 10 s.

    Text goes through math-verify's LaTeX grammar alone, never through sympy's `parse_expr`, which runs Python. A
    ground truth that cannot be read is a ValueError.
    """
    return bool(_verdict(answer, str(ground_truth), _SECONDS))


def _verdict(answer: str, truth: str, seconds: float) -> bool | None:
    """Whether they are equal; None where that cannot be decided in time."""
    if is_equiv(answer, truth):
        return True
    return len(answer) <= _LONGEST and _as_expressions(answer, truth, seconds)


@functools.lru_cache(maxsize=4096)  # samples of one prompt often give the same wrong answer
def _as_expressions(answer: str, truth: str, seconds: float) -> bool | None:
    comparer = _comparer(os.getpid())
    verdict = comparer.ask(answer, truth, seconds)
    if verdict is None and comparer.ask(truth, truth, _SECONDS) is None:
        raise ValueError(f"the ground truth {truth!r} cannot be read as mathematics within {_SECONDS:g} s.")
    return verdict


@functools.cache
def _comparer(process: int) -> _Comparer:
    """That of the process with this id: a fork must not talk to the child of its parent."""
    return _Comparer()


class _Comparer:
    """A child that compares expressions, and stays: a fork for each answer would cost more than the answer."""

    def __init__(self) -> None:
        self.child: Child | None = None
        self.lock = threading.Lock()

    def ask(self, answer: str, truth: str, seconds: float) -> bool | None:
        """Whether they are equal; None where that takes too long or too much memory."""
        import math_verify  # noqa: F401 - before the fork, which is then ready at once

        with self.lock:
            while True:  # it may have died idle: only what a fresh one dies of is to blame
                fresh = self.child is None or self.child.gone
                self.child = Child(_compare) if fresh else self.child
                try:
                    return self.child.call(seconds, answer, truth)
                except TimeoutError:
                    return None
                except ChildDied as error:
                    if fresh:
                        logger.warning("the answer {!r} cannot be compared: {}", answer[:100], error)
                        return None


def _compare(answer: str, truth: str) -> bool:
    """In the child."""
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the time limit is ours

    def read(text: str) -> list:
        # No time limit of its own: that one needs the main thread, and stops no arithmetic in C.
        return parse(f"\\boxed{{{text}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)

    expected = read(truth)
    if not expected:
        raise ValueError(f"the ground truth {truth!r} cannot be read as mathematics.")
    return bool(verify(expected, read(answer), timeout_seconds=None))
