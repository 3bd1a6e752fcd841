"""Test cases of programming problems: from data to programs, from outputs to verdicts.

A program gets its input only. Expected outputs stay outside, and its output is compared here: a program can only fake a
result by knowing the right one.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

_FENCED = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_DECIMAL = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_TOLERANCE = 1e-6
# Solutions of function-call problems are written for a judge that imports these names.
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
    """One run: the program text, its stdin, the expected output; `is_call` when that is a function's result; the
    position among the cases.
    """

    program: str
    stdin: str
    expected: Any
    is_call: bool
    index: int = 0

    def passes(self, stdout: str) -> bool:
        """Whether the program's output is right."""
        if not self.is_call:
            return same_output(stdout, self.expected)
        try:
            result = json.loads(stdout.rstrip().splitlines()[-1])
        except (IndexError, ValueError, RecursionError):  # not what `_CALL` writes
            return False
        possible = [self.expected]
        if isinstance(self.expected, list) and len(self.expected) == 1:  # APPS keeps results in a list of one
            possible.append(self.expected[0])
        return any(same_value(result, expected) for expected in possible)


def extract_code(completion: str) -> str | None:
    """The last fenced block of an answer, closed or not; None without one."""
    blocks = _FENCED.findall(completion)
    return blocks[-1] if blocks else None


def cases_of(code: str, test_cases: Any) -> list[Case]:
    """The runs of {inputs, outputs, fn_name?} (or its JSON text): stdin to stdout, or calls of `fn_name`.

    A call's input is a list of arguments, or text with the JSON of one argument per line.
    """
    tests = json.loads(test_cases) if isinstance(test_cases, str | bytes) else test_cases
    if not isinstance(tests, Mapping) or not {"inputs", "outputs"} <= set(tests):
        raise ValueError(f"test cases need 'inputs' and 'outputs'; got {str(tests)[:200]!r}.")
    inputs, outputs = list(tests["inputs"]), list(tests["outputs"])
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"test cases have {len(inputs)} inputs and {len(outputs)} outputs; one of each is needed.")
    name = tests.get("fn_name")
    cases = []
    for i, (given, expected) in enumerate(zip(inputs, outputs, strict=True)):
        if name is None:
            cases.append(Case(code, _text(given), _text(expected), False, i))
            continue
        arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else list(given)
        program = _PRELUDE + code + _CALL.format(name=str(name), arguments=json.dumps(arguments))
        cases.append(Case(program, "", json.loads(expected) if isinstance(expected, str) else expected, True, i))
    return cases


def share_passed(passed: list[bool], total: int, continuous: bool) -> float:
    """The share of all cases that passed when `continuous`, else 1.0 only for all of them."""
    return sum(passed) / total if continuous else float(sum(passed) == total)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def same_output(output: str, expected: str) -> bool:
    """Equal line by line, whitespace aside; numbers with a decimal point within 1e-6."""
    lines = [line.split() for line in output.rstrip().splitlines()]
    expected_lines = [line.split() for line in expected.rstrip().splitlines()]
    same_lengths = list(map(len, lines)) == list(map(len, expected_lines))
    return same_lengths and all(map(_same_word, chain(*lines), chain(*expected_lines)))


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    numbers = _DECIMAL.fullmatch(word) and _DECIMAL.fullmatch(expected) and ("." in expected or "e" in expected)
    return bool(numbers) and math.isclose(float(word), float(expected), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def same_value(value: Any, expected: Any) -> bool:
    """Equality of JSON values: true is not 1, floats within 1e-6."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, float) or isinstance(expected, float):
        numbers = isinstance(value, int | float) and isinstance(expected, int | float)
        try:
            return numbers and math.isclose(value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        except OverflowError:  # a whole number beyond every float
            return False
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same_value(value[k], expected[k]) for k in value)
    return type(value) is type(expected) and value == expected
