"""Extracts the final answer of a text and compares it with the ground truth (never as a substring)."""

import re

_NUMBER = r"[-+]?\$?\s*\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?"
_MARKUP = r"[\s*_`$(:]*(?:\\\(|\\\[)?\s*"  # of chat models: bold, code, TeX
_MARKED = re.compile(rf"(?:answer\s+is|####){_MARKUP}({_NUMBER})", re.IGNORECASE)
_BOXED = "\\boxed{"


def extract_answer(text: str) -> str | None:
    """The last answer marked by "answer is", "####" or \\boxed{}, normalised; None without one.

    The last of all markers, since an example in the prompt may use another one.
    """
    marked = max(_MARKED.finditer(text), key=re.Match.start, default=None)
    start = text.rfind(_BOXED)
    if marked is not None and marked.start() > start:
        return normalise(marked.group(1))
    depth, first = 1, start + len(_BOXED)
    for i in range(first, len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return normalise(text[first:i])
    return None if marked is None else normalise(marked.group(1))


def normalise(answer: str) -> str:
    """Remove spaces, dollar signs, thousands separators, a final dot, a leading plus and redundant zeros."""
    text = re.sub(r"[\s$,]", "", str(answer)).rstrip(".").removeprefix("+")
    if re.fullmatch(r"-?\d+\.\d*", text):
        text = text.rstrip("0").rstrip(".")
    if re.fullmatch(r"-?\d+", text):
        text = str(int(text))
    return text


def is_correct(text: str, ground_truth: object) -> bool:
    """Whether the answer in `text` is the ground truth (itself a bare answer, or a text that ends with one)."""
    answer = extract_answer(text)
    if answer is None:
        return False
    expected = extract_answer(str(ground_truth))
    return answer == (normalise(str(ground_truth)) if expected is None else expected)
