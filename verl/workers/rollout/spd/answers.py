"""Finds the final answer in a text, to compare it with the ground truth as a whole, never as a substring."""

from __future__ import annotations

import re

_NUMBER = r"[-+]?\$?\s*\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?"
_AFTER_IS = re.compile(r"answer\s+is\s*:?\s*\$?\s*(" + _NUMBER + ")", re.IGNORECASE)
_AFTER_HASHES = re.compile(r"####\s*\$?\s*(" + _NUMBER + ")")


def extract_answer(text: str) -> str | None:
    """The number after the last "answer is", else the last "####", else in the last \\boxed{}; None without one."""
    for pattern in (_AFTER_IS, _AFTER_HASHES):
        found = pattern.findall(text)
        if found:
            return normalise(found[-1])
    boxed = _last_boxed(text)
    return None if boxed is None else normalise(boxed)


def normalise(answer: str) -> str:
    """One spelling a value: no spaces, dollar signs, thousands separators, closing dot, leading plus or idle zeros."""
    text = re.sub(r"[\s$,]", "", str(answer)).rstrip(".").removeprefix("+")
    if re.fullmatch(r"-?\d+\.\d*", text):
        text = text.rstrip("0").rstrip(".")
    if re.fullmatch(r"-?\d+", text):
        text = str(int(text))
    return text


def is_correct(text: str, ground_truth: object) -> bool:
    """Whether the answer in `text` is the ground truth (itself a bare answer, or a text that ends with one)."""
    found = extract_answer(text)
    if found is None:
        return False
    wanted = extract_answer(str(ground_truth))
    return found == (normalise(str(ground_truth)) if wanted is None else wanted)


def _last_boxed(text: str) -> str | None:
    """What stands in the braces of the last \\boxed{...}, nested braces included."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, first = 1, start + len("\\boxed{")
    for i in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[first:i]
    return None
