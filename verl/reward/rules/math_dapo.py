"""Answers of the DAPO and AIME data sets: +1 for the right final answer, -1 otherwise (arXiv 2503.14476)."""

import re
from typing import Any

from verl.reward.rules.math_reward import fix_fracs, fix_sqrt, remove_boxed, same_number
from verl.reward.rules.math_reward import last_boxed_only_string as _last_box

# Only the end of an answer counts: text, and the box of the strict form.
_TAIL, _BOX_TAIL = 300, 100
_NO_ANSWER = "[INVALID]"
ANSWER_PATTERN = r"(?i)Answer\s*:\s*([^\n]+)"
# Normalisation of final answers: appendix D.1 of Minerva, arXiv 2206.14858.
_UNITS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "points", "feet", "minutes",
    "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets",
    "multiples",
)  # fmt: skip
_WORDS = re.compile(
    rf"\b(?:an?(?=\s)|(?:{'|'.join(_UNITS)})(?=\s|$))"
    r"|\\(?:quad|ldots|cdots)|\\[!,;:]|\\\s|\\\$|\^\\circ|\\?%"
)
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox|overline|boxed)\{(.*?)\}")
_MATH = re.compile(r"\$([^$]*)\$")


def last_boxed_only_string(string: str) -> str | None:
    """The last `\\boxed{...}` with its braces; None without one."""
    box = _last_box(string)
    return box if box is not None and box.startswith("\\boxed{") else None


def normalize_final_answer(final_answer: str) -> str:
    """One spelling of a final answer: the part after the last `=`, without units, words and LaTeX decoration."""
    answer = final_answer.rsplit("=", 1)[-1]
    if in_dollars := _MATH.search(answer):
        answer = in_dollars[1]
    answer = _TEXT.sub(r"\1", _WORDS.sub("", answer))
    answer = fix_sqrt(fix_fracs(answer)).replace("\\left", "").replace("\\right", "").replace("$", "")
    answer = re.sub(r"^\.(?=\d)", "0.", re.sub(r"\s+", "", answer)).strip(".").replace("{,}", ",")
    plain = answer.replace(",", "")
    return plain if plain.isdigit() else answer


def is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str = ANSWER_PATTERN
) -> tuple[bool, str]:
    """(whether the last 'Answer: ...' is the ground truth, that answer normalised); '[INVALID]' without one."""
    answers = re.findall(answer_pattern, solution_str)
    predicted = normalize_final_answer(answers[-1] if answers else _NO_ANSWER)
    truth = str(gt)
    if gt_need_extract:
        truth = remove_boxed(last_boxed_only_string(truth) or truth)
    return _same(predicted, normalize_final_answer(truth)), predicted


def is_correct_strict_box(pred: str, gt: str, pause_tokens_index: list[int] | None = None) -> tuple[int, str | None]:
    """(1 or -1, the content of the last box in the answer's last 100 characters, None without a box).

    `pause_tokens_index`: four positions in the text; the part that counts then starts 100 characters before the last.
    """
    if pause_tokens_index is not None and len(pause_tokens_index) != 4:
        raise ValueError(f"pause_tokens_index={pause_tokens_index} needs four positions.")
    end = len(pred) if pause_tokens_index is None else pause_tokens_index[-1]
    boxed = last_boxed_only_string(pred[max(0, end - _BOX_TAIL) :])
    content = None if boxed is None else remove_boxed(boxed)
    return (1 if content is not None and _same(content, str(gt)) else -1), content


def _same(answer: str, truth: str) -> bool:
    return answer == truth or same_number(answer.replace(",", ""), truth.replace(",", ""))


def verify(
    solution_str: str, answer: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> tuple[bool, str | None]:
    """(whether the answer is right, the extracted answer).

    Without `strict_box_verify` a text without 'Answer:' is judged by its last box, too.
    """
    if not strict_box_verify:
        correct, predicted = is_correct_minerva(solution_str, answer)
        if predicted != normalize_final_answer(_NO_ANSWER):
            return correct, predicted
    verdict, content = is_correct_strict_box(solution_str, answer, pause_tokens_index)
    if content is None and not strict_box_verify:
        content = _NO_ANSWER
    return verdict == 1, content


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> dict[str, Any]:
    """{score: 1.0 or -1.0, acc: whether it is right, pred: the extracted answer}."""
    if not strict_box_verify:
        solution_str = solution_str[-_TAIL:]
    correct, predicted = verify(solution_str, ground_truth, strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": predicted}
