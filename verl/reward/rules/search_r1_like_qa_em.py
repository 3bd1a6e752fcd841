"""Short answers to questions, in <answer> tags, compared after normalisation (SQuAD, Search-R1)."""

import re
import string
from collections.abc import Iterable, Mapping
from typing import Any

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MOST_TAGS = 10  # a right answer in a text with more tags was guessed


def normalize_answer(s: str) -> str:
    """Lower case, without punctuation, articles and double spaces."""
    return " ".join(_ARTICLES.sub(" ", s.lower().translate(_NO_PUNCTUATION)).split())


def em_check(prediction: str, golden_answers: str | Iterable[str]) -> int:
    """1 when the prediction is one of the answers."""
    return int(normalize_answer(prediction) in _normalized(golden_answers))


def subem_check(prediction: str, golden_answers: str | Iterable[str]) -> int:
    """1 when the prediction contains one of the answers."""
    text = normalize_answer(prediction)
    return int(any(answer in text for answer in _normalized(golden_answers)))


def _normalized(golden_answers: str | Iterable[str]) -> list[str]:
    answers = [golden_answers] if isinstance(golden_answers, str) else golden_answers
    return [normalize_answer(str(answer)) for answer in answers]


def extract_solution(solution_str: str) -> str | None:
    """The content of the last pair of <answer> tags; None without one."""
    closed, _, _ = solution_str.rpartition("</answer>")  # each unclosed tag would search to the end
    answers = _ANSWER.findall(f"{closed}</answer>")
    return answers[-1].strip() if answers else None


def count_answer_tags(text: str) -> tuple[int, int]:
    """Numbers of <answer> and </answer>."""
    return text.count("<answer>"), text.count("</answer>")


def compute_score(
    solution_str: str, ground_truth: Mapping[str, Any], method: str = "strict", format_score: float = 0.0,
    score: float = 1.0,
) -> float:  # fmt: skip
    """`score` when the answer is one of `ground_truth["target"]`, `format_score` for another, 0 without an answer.

    A right answer in a text with more than 10 opening or closing tags gets a quarter of `score`.
    """
    guessed = max(count_answer_tags(solution_str)) > _MOST_TAGS
    return _scored(em_check, solution_str, ground_truth, format_score, score / 4 if guessed else score)


def compute_score_subem(
    solution_str: str, ground_truth: Mapping[str, Any], method: str = "strict", format_score: float = 0.0,
    score: float = 1.0,
) -> float:  # fmt: skip
    """`score` when the answer contains one of the targets, `format_score` or 0 as in `compute_score`."""
    return _scored(subem_check, solution_str, ground_truth, format_score, score)


def _scored(check: Any, text: str, ground_truth: Mapping[str, Any], format_score: float, score: float) -> float:
    answer = extract_solution(text)
    if answer is None:
        return 0.0
    return score if check(answer, ground_truth["target"]) else format_score
