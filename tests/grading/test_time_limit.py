"""Time limits: in a process that is killed, in place by a signal; nothing outlives its caller."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from pebble import ProcessExpired

from verl.grading.time_limit import timeout_limit

ROOT = Path(__file__).parents[2]


def work(what):
    """The process id; or what the text says."""
    if what == "hang":
        while True:
            pass
    if what == "C code":
        10 ** 10**9 % 7
    if what == "die":
        os._exit(3)
    if what == "raise":
        raise KeyError("boom")
    return os.getpid()


def test_a_call_in_a_process_returns_raises_and_dies():
    limited = timeout_limit(5.0)(work)
    assert limited("a") != os.getpid() and limited.__name__ == "work"
    with pytest.raises(KeyError, match="boom"):
        limited("raise")
    with pytest.raises(ProcessExpired, match="^work: its process ended with exit code 3$"):
        limited("die")
    assert timeout_limit(5.0)(lambda function: function())(lambda: 7) == 7  # arguments need not be picklable


@pytest.mark.parametrize("what, use_signals", [("hang", False), ("C code", False), ("hang", True)])
def test_a_call_that_takes_too_long_is_stopped(what, use_signals):
    before, began = psutil.Process().children(), time.monotonic()
    with pytest.raises(TimeoutError, match="work took longer than 0.3 s"):
        timeout_limit(0.3, use_signals)(work)(what)
    assert time.monotonic() - began < 3 and psutil.Process().children() == before


def test_a_call_cannot_swallow_the_signal():
    def stubborn():
        while True:
            try:
                work("hang")
            except Exception:
                continue

    with pytest.raises(TimeoutError):
        timeout_limit(0.2, use_signals=True)(stubborn)()


def test_no_process_outlives_a_caller_that_is_killed():
    script = (
        "import os\n"
        "from tests.grading.test_time_limit import work\n"
        "from verl.grading.time_limit import timeout_limit\n"
        "timeout_limit(600)(lambda: (print(os.getpid(), flush=True), work('hang')))()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    child = psutil.Process(int(owner.stdout.readline()))
    assert child.is_running()
    owner.kill()
    owner.communicate()
    assert psutil.wait_procs([child], timeout=10)[1] == []


def test_mathematics_is_compared_without_torch():
    script = (
        "import sys\n"
        "from verl.utils.reward_score import default_compute_score\n"
        "print(default_compute_score('lighteval/MATH', '\\\\boxed{2+2}', '4'), 'torch' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout == "1.0 False\n", ran.stderr
