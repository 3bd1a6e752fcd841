"""Decides with math-verify whether a boxed answer equals the ground truth."""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
from typing import Any

from loguru import logger

from verl.reward.rules.math_reward import boxed_answer, is_equiv
from verl.utils.children import ChildDied, ForkedChild, ProcessorSeconds

_SECONDS = 10.0  # of processor time, for one comparison
_BEFORE_ANSWER = re.compile(r"\banswer\s*:|\bis\b:?", re.IGNORECASE)  # if the answer is not in a box
_LONGEST = 2000  # characters; a longer answer counts as wrong


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0, seconds: float = _SECONDS) -> float:
    """1.0 when the last boxed answer equals the ground truth, as text or as an expression; else 0.0.

    `timeout_score` when the comparison takes more than `seconds` of processor time, or its process dies, for instance
    of a lack of memory: a hostile answer such as 9^{9^{9^9}} is wrong, not an error. Raises ValueError for a ground
    truth that cannot be read.
    """
    answer = boxed_answer(model_output)
    verdict = False if answer is None else _verdict(answer, str(ground_truth), seconds)
    return float(timeout_score if verdict is None else verdict)


def compute_numina_score(model_output: str, ground_truth: str, **kwargs: Any) -> float:
    """`compute_score` for a text with a box; another text is compared with the ground truth as text.

    Either all of it, or what follows the last "answer:" or "is", has to equal the ground truth. `kwargs` are those of
    `compute_score`.
    """
    if "\\boxed" in model_output or "\\fbox" in model_output:
        return compute_score(model_output, ground_truth, **kwargs)
    last = _BEFORE_ANSWER.split(model_output)[-1].strip().rstrip(".")
    return float(any(is_equiv(answer, str(ground_truth)) for answer in (model_output, last)))


def is_equal(answer: str, ground_truth: str) -> bool:
    """Whether two pieces of LaTeX (or plain numbers) are equal, as text or as expressions.

    False when that takes more than 10 s of processor time. Text goes through math-verify's LaTeX grammar only, never
    through sympy's `parse_expr`, which runs Python. Raises ValueError for a ground truth that cannot be read.
    """
    return bool(_verdict(answer, str(ground_truth), _SECONDS))


def _verdict(answer: str, truth: str, seconds: float) -> bool | None:
    """Whether they are equal; None when that cannot be decided in time."""
    if is_equiv(answer, truth):
        return True
    return False if len(answer) > _LONGEST else _equal_expressions(answer, truth, seconds)


@functools.lru_cache(maxsize=4096)  # samples of one prompt often give the same wrong answer
def _equal_expressions(answer: str, truth: str, seconds: float) -> bool | None:
    """Whether they are equal as expressions; None when that cannot be decided, which the cache keeps too.

    Raises ValueError if the truth cannot even be compared with itself.
    """
    comparer = _comparer(os.getpid())
    verdict = comparer.ask(answer, truth, seconds)
    if verdict is None and comparer.ask(truth, truth, _SECONDS) is None:
        raise ValueError(f"the ground truth {truth!r} cannot be read as mathematics within {_SECONDS:g} s.")
    return verdict


@functools.cache
def _comparer(process: int) -> _Comparer:
    """The comparer of this process, by its id: a fork must not use the child of its parent."""
    return _Comparer()


class _Comparer:
    """Compares expressions in a child that is kept: a fork for each answer would cost more than the comparison."""

    def __init__(self) -> None:
        self.child: ForkedChild | None = None
        self.lock = threading.Lock()

    def ask(self, answer: str, truth: str, seconds: float) -> bool | None:
        """Whether they are equal; None when the comparison exceeds `seconds` or kills the child. For any thread."""
        import math_verify  # noqa: F401 - before the fork, which is then ready at once

        with self.lock:
            # A kept child may have died since the last call: a new one is asked then. If that dies, the answer is to
            # blame.
            while True:
                fresh = self.child is None or self.child.gone
                self.child = ForkedChild(_compare) if fresh else self.child
                try:
                    return self.child.call(ProcessorSeconds(seconds), answer, truth)
                except TimeoutError:
                    return None
                except ChildDied as error:
                    if fresh:
                        logger.warning("the answer {!r} cannot be compared: {}", answer[:100], error)
                        return None


def _compare(answer: str, truth: str) -> bool:
    """Whether they are equal expressions; runs in the child."""
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about parsing_timeout=None

    def read(text: str) -> list:
        # Its own time limit needs the main thread and cannot stop arithmetic in C.
        return parse(f"\\boxed{{{text}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)

    expected = read(truth)
    if not expected:
        raise ValueError(f"the ground truth {truth!r} cannot be read as mathematics.")
    return bool(verify(expected, read(answer), timeout_seconds=None))
