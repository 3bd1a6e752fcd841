"""Finds the final answer in a text, to compare it with the ground truth as a whole, never as a substring."""

from __future__ import annotations

import re

_NUMBER = r"[-+]?\$?\s*\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?"
_MARKUP = r"[\s*_`$(:]*(?:\\\(|\\\[)?\s*"  # of chat models: bold, code, TeX
_MARKED = re.compile(rf"(?:answer\s+is|####){_MARKUP}({_NUMBER})", re.IGNORECASE)
_BOXED = "\\boxed{"


def extract_answer(text: str) -> str | None:
    """What stands last behind "answer is", behind "####" or in \\boxed{}; None where none of them stands.

    The last of all: an example in the prompt may end its answer another way.
    """
    marked = max(_MARKED.finditer(text), key=re.Match.start, default=None)
    start = text.rfind(_BOXED)
    if marked is not None and marked.start() > start:
        return normalise(marked.group(1))
    boxed = _braced(text, start + len(_BOXED)) if start >= 0 else None
    if boxed is None and marked is not None:
        boxed = marked.group(1)
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


def _braced(text: str, first: int) -> str | None:
    """What stands from `first` up to the brace that closes the one before it; None where none does."""
    depth = 1
    for i in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[first:i]
    return None
