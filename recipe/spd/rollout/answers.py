"""Extracts the final answer of a text and compares it with the ground truth (never as a substring)."""

import re
from fractions import Fraction

# Neighbours of a quantifier never match the same characters, unless it is possessive (*+): a text of spaces or equal
# signs would take exponential time otherwise.
_PART = r"(?:\s*/\s*\d+|\s+\d+\s*/\s*\d+|\s*\\[dt]?frac\{\d+\}\{\d+\})"  # 1/2, 3 1/2, 3\frac{1}{2}
_NUMBER = rf"\s*+[-+]?\s*+\\?[$€£]?\s*+[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d{{1,3}}(?!\d))?{_PART}?"
_MARKUP = r"[\s*_`$(:]*+(?:\\\(|\\\[)?\s*+"  # of chat models: bold, code, TeX
_ABOUT = r"(?:(?:about|approximately|roughly|USD|≈|\\approx)\s*+)?"
_CALCULATION = r"(?:(?:[-+*/×÷()\d,$%\s]|\.\d|\\times|\\cdot|\b[a-z]\b)++=)*"  # "3 * 6 =", "x ="
_MARKER = r"(?:answer[*_`\s]*+(?:is\b|:)|####)"
_MARKED_NUMBER = re.compile(rf"{_MARKER}{_MARKUP}{_ABOUT}({_CALCULATION}{_NUMBER})", re.IGNORECASE)
_MARKED_WORDS = re.compile(rf"{_MARKER}[\s*_`$(:\"']*+([^\n.!?]*)", re.IGNORECASE)  # up to the end of the sentence
_BOX = "\\boxed{"
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}(?:\^\{?\d\}?)?")  # \text{ cm}^2
_SPACING = re.compile(r"\\[,;!: ]|~|\*\*|\\(?:left|right)\b|\\?[$€£%]|\^\{?\\circ\}?|\s+")
_FRACTION = re.compile(r"([-+]?)(\d*)\\[dt]?frac\{([-+]?\d+)\}\{(\d+)\}")  # 3\frac{1}{2} is 3.5
# A number or fraction, perhaps with a unit.
_QUANTITY = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?: ?/ ?\d+)?)(?: ?[a-zA-Z]{2,}[a-zA-Z ./]*(?:\^\{?\d\}?)?)?\.?")


def extract_answer(text: str) -> str | None:
    """The last answer marked by "answer is", "Answer:", "####" or \\boxed{}, normalised; None without one.

    The last of all markers, since an example in the prompt may use another one.
    """
    *_, marked = [None, *_MARKED_NUMBER.finditer(text)]
    box = text.rfind(_BOX)
    if box >= 0 and (marked is None or marked.start() < box):
        boxed, depth = text[box + len(_BOX) :], 1
        for i, character in enumerate(boxed):
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                return normalise(boxed[:i])
    return None if marked is None else normalise(marked.group(1))


def final_answer(text: str) -> str | None:
    """As `extract_answer`, but words count too: without a number, what follows the last marker up to the end of its
    sentence; None without a marker.
    """
    number = extract_answer(text)
    if number is not None:
        return number
    *_, last = ["", *_MARKED_WORDS.findall(text)]
    return last.strip(" *_`\"')") or None


def normalise(answer: str) -> str:
    """The bare answer: of an equation its right side; a quantity without unit, currency, percent sign, thousands
    separators, leading plus and redundant zeros; anything else without spaces.
    """
    text = str(answer)
    without_text = _TEXT.sub(" ", text)  # \text{ m}: a unit, unless the number itself stands in it
    text = without_text if re.search(r"\d", without_text) else _TEXT.sub(r"\1", text)
    text = _SPACING.sub(" ", text.rpartition("=")[2]).strip().replace("{,}", ",")
    text = re.sub(r"(?<=\d) ?, ?(?=\d{3}(?!\d))", "", text)  # 1,800
    text = re.sub(r"^([-+]?\d+) (\d+) ?/ ?(\d+)(?!\d)", r"\1\\frac{\2}{\3}", text)  # 2 1/2
    text = re.sub(r"^([-+]) ", r"\1", text)
    if quantity := _QUANTITY.fullmatch(text):
        text = quantity.group(1)
    text = text.replace(" ", "").rstrip(".").removeprefix("+")
    if re.fullmatch(r"-?\d*\.\d*", text):
        text = text.rstrip("0").rstrip(".")
    return re.sub(r"^(-?)0+(?=\d)", r"\1", text)


def is_correct(text: str, ground_truth: object) -> bool:
    """Whether the answer in `text` is the ground truth (itself a bare answer, or a text that ends with one).

    Numbers are compared by value; other mathematics by math-verify, everything else as text.
    """
    expected = final_answer(str(ground_truth)) or str(ground_truth)
    if not re.search(r"[\d\\]", expected):  # words, such as a name
        answer = final_answer(text)
        return answer is not None and normalise(answer).casefold() == normalise(expected).casefold()
    answer = extract_answer(text)
    if answer is None:
        return False
    expected = extract_answer(str(ground_truth)) or normalise(str(ground_truth))
    if answer == expected:
        return True
    ours, theirs = _value(answer), _value(expected)
    if theirs is not None and ours is not None:
        return ours == theirs
    if not re.search(r"[\\^]", answer + expected):  # plain words and numbers hold no further mathematics
        return False
    from verl.reward.rules.math_verify import is_equal

    try:
        return is_equal(answer, expected)
    except ValueError:  # the ground truth is no mathematics: the texts were compared above
        return False


def _value(answer: str) -> Fraction | None:
    """The value of a normalised number, fraction or mixed number; None for anything else."""
    if re.search(r"[eE][-+]?\d{4,}", answer):  # computing such a power of ten takes minutes
        return None
    try:
        if mixed := _FRACTION.fullmatch(answer):
            sign, whole, numerator, denominator = mixed.groups()
            return int(f"{sign}1") * (int(whole or 0) + Fraction(int(numerator), int(denominator)))
        return Fraction(answer)
    except (ValueError, ZeroDivisionError):
        return None
