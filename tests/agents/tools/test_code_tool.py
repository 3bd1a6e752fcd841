"""CodeTool in the real sandbox: programs that print, fail, hang, fork and flood."""

import asyncio
import resource

import psutil
import pytest

from verl.agents.tools.code_tool import CodeTool
from verl.agents.tools.runner import ToolRunner

pytestmark = pytest.mark.process

FORKS = """
import os
try:
    while True:
        os.fork()
except OSError as error:
    print("refused", error.errno)
"""


def answers(*programs, **limits):
    async def converse():
        runner = ToolRunner([CodeTool({"type": "native", **limits}, None)], max_tool_response_length=2000)
        async with runner.conversation() as tools:
            results = await asyncio.gather(*(tools.call("code_interpreter", {"code": code}) for code in programs))
        assert not [result.failure for result in results if result.failure]
        return [result.response.text for result in results]

    return asyncio.run(converse())


def test_programs_answer_what_they_print(confined):
    printed, fenced, silent, wrong, forks = answers(
        "print(6 * 7)", "```python\nprint('fenced')\n```", "x = 1", "print('before')\n1 / 0", FORKS
    )
    assert (printed, fenced, silent) == ("42", "fenced", "The program printed nothing.")
    assert wrong.startswith("before\nTraceback") and "ZeroDivisionError" in wrong
    assert wrong.endswith("The program ended with exit code 1.")
    assert forks == "refused 1"


def test_a_program_that_hangs_and_one_that_floods_are_stopped(confined):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = set(psutil.Process().children(recursive=True))
    endless = "print('a', flush=True)\nwhile True: pass"
    hang, flood = answers(endless, "print('x' * 100_000_000)", seconds=8, output_kb=64)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert hang == "a\nThe program was stopped after 8 s."
    assert flood.startswith("x" * 1000 + "...(truncated)...x")
    assert flood.endswith("The program was stopped: it printed more than 64 KiB.")
    assert grown_kb < 40_000 and not set(psutil.Process().children(recursive=True)) - children
