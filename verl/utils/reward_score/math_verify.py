"""Decides with math-verify whether a boxed answer equals the ground truth."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
from concurrent.futures.process import BrokenProcessPool

import pebble
from loguru import logger

from verl.grading.pool import FatalGradingError
from verl.grading.time_limit import prepare_child
from verl.utils.reward_score.math_reward import boxed_answer, is_equiv

_SECONDS = 10.0
_LONGEST = 2000  # characters; a longer answer counts as wrong


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0, seconds: float = _SECONDS) -> float:
    """1.0 when the last boxed answer equals the ground truth, else 0.0.

    `timeout_score` when the comparison takes longer than `seconds`: a hostile answer such as 9^{9^{9^9}} is wrong, not
    an error.
    """
    answer = boxed_answer(model_output)
    verdict = False if answer is None else _verdict(answer, str(ground_truth), seconds)
    return float(timeout_score if verdict is None else verdict)


def is_equal(answer: str, ground_truth: str) -> bool:
    """Whether two pieces of LaTeX (or plain numbers) are equal, as text or as expressions, within 10 s.

    Text goes through math-verify's LaTeX grammar only, never through sympy's `parse_expr`, which runs Python. A ground
    truth that cannot be parsed is a ValueError.
    """
    return bool(_verdict(answer, str(ground_truth), _SECONDS))


def _verdict(answer: str, truth: str, seconds: float) -> bool | None:
    """Whether they are equal; None when that cannot be decided in time."""
    if is_equiv(answer, truth):
        return True
    return len(answer) <= _LONGEST and _equal_expressions(answer, truth, seconds)


@functools.lru_cache(maxsize=4096)  # samples of one prompt often give the same wrong answer
def _equal_expressions(answer: str, truth: str, seconds: float) -> bool | None:
    verdict = _run_compare(answer, truth, seconds)
    if verdict is None and _run_compare(truth, truth, _SECONDS) is None:
        raise ValueError(f"the ground truth {truth!r} cannot be read as mathematics within {_SECONDS:g} s.")
    return verdict


def _run_compare(answer: str, truth: str, seconds: float) -> bool | None:
    """`_compare` in a process that is killed after `seconds`; None when it took too long or too much memory."""
    import math_verify  # noqa: F401 - before the fork, which then starts at once

    for _ in range(2):
        pool = _pool(os.getpid())
        try:
            if pool.active:
                return pool.schedule(_compare, (answer, truth), timeout=seconds).result()
        except TimeoutError:
            return None
        except pebble.ProcessExpired as error:
            logger.warning("the answer {!r} cannot be compared: exit code {}", answer[:100], error.exitcode)
            return None
        except BrokenProcessPool:  # the process was killed while it had nothing to do
            pass
        _pool.cache_clear()
    raise FatalGradingError("the process that compares mathematics ends at once; is the machine out of memory?")


@functools.cache
def _pool(process: int) -> pebble.ProcessPool:
    """The pool of the process with this id: a fork must not use the one of its parent."""
    return pebble.ProcessPool(1, initializer=prepare_child, context=multiprocessing.get_context("fork"))


def _compare(answer: str, truth: str) -> bool:
    """Whether they are equal expressions; runs in the child process."""
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about parsing_timeout=None

    def read(text: str) -> list:
        # Its own time limit needs the main thread and cannot stop arithmetic in C.
        return parse(f"\\boxed{{{text}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)

    expected = read(truth)
    if not expected:
        raise ValueError(f"the ground truth {truth!r} cannot be read as mathematics.")
    return bool(verify(expected, read(answer), timeout_seconds=None))
