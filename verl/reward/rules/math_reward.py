"""Boxed answers of the MATH data set, compared as normalised LaTeX text."""

import re
from decimal import Decimal

from loguru import logger

_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*(?=\{)| )")
# Written without braces: \frac12, \frac{1}2, \frac1{72}; \sqrt3.
_FRACTION = re.compile(r"\\frac\s*(\{[^{}]*\}|[^\s{\\])\s*(\{[^{}]*\}|[^\s{\\])")
_ROOT = re.compile(r"\\sqrt\s*([^\s{\[\\])")
_QUOTIENT = re.compile(r"(-?\d{1,100})/(-?\d{1,100})")  # Python makes no number of thousands of digits
# Words at the very end, perhaps to a power; elsewhere, or with digits, they may separate two answers.
_UNIT = re.compile(r"\\text\{ (?=[^{}]*[^\W\d])[^{}\d=]*\}(?:\^(?:\d|\{-?\d\}))?[\s$.]*$")
_NAME = re.compile(r"^[^\W\d]\w?=")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?")
# Decoration without a meaning.
_DROPPED = re.compile(r"\\!|\\,|\\;|\\left|\\right|\^\{?\\circ\}?|\\\$|\$|\\?%|\s+")
_SPELLINGS = (("\\tfrac", "\\frac"), ("\\dfrac", "\\frac"), ("\\cfrac", "\\frac"))


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1.0 when the last boxed answer is the ground truth as normalised text, else 0.0."""
    answer = boxed_answer(solution_str)
    return float(answer is not None and is_equiv(answer, ground_truth))


def boxed_answer(text: str) -> str | None:
    """The content of the last box of a text; None without a box, or when the last one cannot be parsed."""
    box = last_boxed_only_string(text)
    return None if box is None else remove_boxed(box)


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Whether two answers are the same text after `strip_string`, or the same number before or after it.

    None equals None alone. With `verbose`, both texts are logged.
    """
    if str1 is None or str2 is None:
        return str1 is None and str2 is None
    first, second = strip_string(str1), strip_string(str2)
    if verbose:
        logger.info("{} | {}", first, second)
    return first == second or same_number(str1.strip(), str2.strip()) or same_number(first, second)


def same_number(first: str, second: str) -> bool:
    """Whether both texts are numbers, and of one value: `5.0` and `5`."""
    return all(map(_NUMBER.fullmatch, (first, second))) and Decimal(first) == Decimal(second)


def last_boxed_only_string(string: str) -> str | None:
    """The last `\\boxed{...}` or `\\fbox{...}` (or `\\boxed x`, up to a `$`), braces included.

    None without one, and when the last one is not closed or LaTeX would parse it differently (`\\boxed\\frac12`).
    """
    start = max(string.rfind("\\boxed"), string.rfind("\\fbox"))
    opened = _BOX.match(string, start) if start >= 0 else None
    if opened is None:
        return None
    if string[opened.end() : opened.end() + 1] != "{":
        return string[start:].split("$")[0]
    depth = 0
    for i in range(opened.end(), len(string)):
        depth += {"{": 1, "}": -1}.get(string[i], 0)
        if depth == 0:
            return string[start : i + 1]
    return None


def remove_boxed(s: str) -> str:
    """The content of the box of `last_boxed_only_string`; ValueError when `s` is not a box."""
    opened = _BOX.match(s)
    if opened is not None and s[opened.end() : opened.end() + 1] != "{":
        return s[opened.end() :]
    if opened is not None and s.endswith("}"):
        return s[opened.end() + 1 : -1]
    remedy = "take it from last_boxed_only_string, unless that is None"
    raise ValueError(f"{s[:80]!r} is not a \\boxed{{...}} or \\fbox{{...}}; {remedy}.")


def fix_fracs(string: str) -> str:
    """Braces around the two parts of each fraction: `\\frac12` -> `\\frac{1}{2}`."""
    return _FRACTION.sub(lambda m: "\\frac" + "".join(p if p[0] == "{" else f"{{{p}}}" for p in m.groups()), string)


def fix_a_slash_b(string: str) -> str:
    """A quotient of two integers as a fraction: `3/4` -> `\\frac{3}{4}`; anything else stays."""
    match = _QUOTIENT.fullmatch(string)
    return f"\\frac{{{int(match[1])}}}{{{int(match[2])}}}" if match else string


def remove_right_units(string: str) -> str:
    """The answer without the unit after it: `5\\text{ cm}` -> `5`."""
    return _UNIT.sub("", string)


def fix_sqrt(string: str) -> str:
    """Braces around a root's one character: `\\sqrt3` -> `\\sqrt{3}`."""
    return _ROOT.sub(r"\\sqrt{\1}", string)


def strip_string(string: str) -> str:
    """One spelling of an answer.

    Without spaces, degrees, dollars, percents, `\\left`, `\\right`, `x=` in front and a unit at the end. Roots and
    fractions have braces. A quotient of integers and 0.5 become fractions; other decimals get a digit before the point.
    """
    for spelling, plain in _SPELLINGS:
        string = string.replace(spelling, plain)
    string = _DROPPED.sub("", remove_right_units(string))
    string = re.sub(r"(?<!\d)\.(?=\d)", "0.", string)
    string = fix_a_slash_b(fix_fracs(fix_sqrt(_NAME.sub("", string))))
    return "\\frac{1}{2}" if string == "0.5" else string
