"""Test cases of programming problems: from data to programs, from outputs to verdicts.

What a program is told is its input alone; expected outputs stay outside, and a verdict is a comparison made here of
what the program wrote. A program can therefore lie about its result only by knowing the right one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FENCED = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_DECIMAL = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_TOLERANCE = 1e-6
# Solutions of function-call problems are written for a judge that has these names at hand.
_PRELUDE = """\
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *; from collections import *; from functools import *; from heapq import *; from itertools import *
from math import *
from typing import *
sys.setrecursionlimit(100000)
"""
_CALL = """

import json as _json, sys as _sys
_target = Solution() if "Solution" in globals() else None
_function = getattr(_target, {name!r}) if hasattr(_target, {name!r}) else globals()[{name!r}]
_result = _json.dumps(_function(*_json.loads({arguments!r})))
_sys.stdout.flush()
_sys.__stdout__.write("\\n" + _result + "\\n")
_sys.__stdout__.flush()
"""


@dataclass(frozen=True)
class Case:
    """One run: the program text, its stdin, the output that is right; `is_call` when that is a function's result."""

    program: str
    stdin: str
    expected: Any
    is_call: bool

    def passes(self, stdout: str) -> bool:
        """Whether what the program wrote is right."""
        if not self.is_call:
            return same_output(stdout, self.expected)
        lines = stdout.rstrip().splitlines()
        try:
            result = json.loads(lines[-1]) if lines else None
        except (ValueError, RecursionError):  # not what `_CALL` writes
            return False
        expected = self.expected
        wrapped = isinstance(expected, list) and len(expected) == 1  # APPS keeps results in a list of one
        return bool(lines) and (same_value(result, expected) or wrapped and same_value(result, expected[0]))


def extract_code(completion: str) -> str | None:
    """The last fenced block of an answer, closed or not; None without one."""
    found = _FENCED.findall(completion)
    return found[-1] if found else None


def cases_of(code: str, test_cases: Any) -> list[Case]:
    """The runs of {inputs, outputs, fn_name?} (or its JSON text): stdin to stdout, or calls of `fn_name`.

    A call's input is a list of arguments, or text with the JSON of one argument a line.
    """
    tests = json.loads(test_cases) if isinstance(test_cases, str | bytes) else test_cases
    if not isinstance(tests, Mapping) or not {"inputs", "outputs"} <= set(tests):
        raise ValueError(f"test cases need 'inputs' and 'outputs'; found {str(tests)[:200]!r}.")
    inputs, outputs = list(tests["inputs"]), list(tests["outputs"])
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"test cases have {len(inputs)} inputs and {len(outputs)} outputs; one of each is needed.")
    name = tests["fn_name"] if "fn_name" in tests else None
    if name is None:
        return [Case(code, _text(i), _text(o), False) for i, o in zip(inputs, outputs, strict=True)]
    cases = []
    for given, expected in zip(inputs, outputs, strict=True):
        arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else list(given)
        program = _PRELUDE + code + _CALL.format(name=str(name), arguments=json.dumps(arguments))
        cases.append(Case(program, "", json.loads(expected) if isinstance(expected, str) else expected, True))
    return cases


def share_passed(passed: list[bool], total: int, continuous: bool) -> float:
    """The share of all cases that passed when `continuous`, else 1.0 only for all of them."""
    return sum(passed) / total if continuous else float(sum(passed) == total)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def same_output(found: str, expected: str) -> bool:
    """Equal line by line but for space at the ends; numbers with a decimal point within 1e-6."""
    ours, theirs = ([line.split() for line in text.rstrip().splitlines()] for text in (found, expected))
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(ours, theirs, strict=True)
    )


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    numbers = _DECIMAL.fullmatch(found) and _DECIMAL.fullmatch(expected) and ("." in expected or "e" in expected)
    return bool(numbers) and math.isclose(float(found), float(expected), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def same_value(found: Any, expected: Any) -> bool:
    """Equality of JSON values: true is not 1, floats within 1e-6."""
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, float) or isinstance(expected, float):
        numbers = isinstance(found, int | float) and isinstance(expected, int | float)
        try:
            return numbers and math.isclose(found, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        except OverflowError:  # a whole number beyond every float
            return False
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(same_value, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same_value(found[k], expected[k]) for k in found)
    return type(found) is type(expected) and found == expected
