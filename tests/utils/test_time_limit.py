"""Forked processes that serve calls: they are reused, killed at the limit, and do not outlive their caller."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from verl.utils.time_limit import (
    Child,
    ChildDied,
    ProcessorSeconds,
    call_interruptibly,
    call_with_alarm,
    timeout_limit,
)

ROOT = Path(__file__).parents[2]
asked = []


def work(what):
    """Process and number of calls; or what the text says."""
    asked.append(what)
    if what == "hang":
        while True:
            pass
    if what == "die":
        os._exit(3)
    if what == "raise":
        raise KeyError("boom")
    return os.getpid(), len(asked)


@pytest.mark.process
def test_a_child_stays_until_a_call_takes_too_long():
    child = Child(work)
    pid, count = child.call(5.0, "a")
    assert pid != os.getpid() and child.call(5.0, what="b") == (pid, count + 1) and not asked
    with pytest.raises(KeyError, match="boom"):
        child.call(5.0, "raise")
    assert child.call(5.0, "c") == (pid, count + 3) and not child.gone
    with pytest.raises(TimeoutError, match="work took longer than 0.3 s"):
        child.call(0.3, "hang")
    assert child.gone and not psutil.pid_exists(pid) and child.end() is None


@pytest.mark.process
def test_a_child_that_dies_is_reported_with_its_exit_code():
    for call in (lambda: Child(work).call(5.0, "die"), lambda: timeout_limit(5.0)(work)("die")):
        with pytest.raises(ChildDied, match="^work: its process ended with exit code 3$"):
            call()


@pytest.mark.process
def test_a_child_that_died_idle_is_reported_too():
    child = Child(work)
    os.kill(child.call(5.0, "a")[0], signal.SIGKILL)
    with pytest.raises(ChildDied, match="exit code -9"):
        child.call(5.0, "b")


@pytest.mark.process
def test_an_answer_that_was_not_waited_for_is_not_that_of_the_next_call():
    child = Child(work)
    with pytest.raises(TimeoutError, match="took longer than 0.2 s"):
        timeout_limit(0.2, use_signals=True)(child.call)(30.0, "hang")
    assert child.gone


def test_a_call_cannot_swallow_the_signal():
    def stubborn():
        while True:
            try:
                work("hang")
            except Exception:
                continue

    with pytest.raises(TimeoutError):
        timeout_limit(0.2, use_signals=True)(stubborn)()


@pytest.mark.process
def test_no_child_outlives_a_caller_that_is_killed():
    script = (
        "import os\n"
        "from tests.utils.test_time_limit import work\n"
        "from verl.utils.time_limit import Child\n"
        "child = Child(work)\n"
        "print(child.call(5.0, 'a')[0], flush=True)\n"
        "child.call(600.0, 'hang')\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    child = psutil.Process(int(owner.stdout.readline()))
    time.sleep(0.2)
    assert child.is_running()
    owner.kill()
    owner.communicate()
    assert psutil.wait_procs([child], timeout=10)[1] == []


@pytest.mark.process
def test_mathematics_is_compared_without_torch():
    script = (
        "import sys\n"
        "from verl.reward.rules import default_compute_score\n"
        "print(default_compute_score('lighteval/MATH', '\\\\boxed{2+2}', '4'), 'torch' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout == "1.0 False\n", ran.stderr


def spin():
    while True:
        pass


@pytest.mark.parametrize("call", [call_with_alarm, call_interruptibly])
def test_processor_time_does_not_pass_while_a_call_waits(call):
    assert call(lambda: time.sleep(0.4) or "done", ProcessorSeconds(0.1)) == "done"
    began = time.thread_time()
    with pytest.raises(TimeoutError):
        call(spin, ProcessorSeconds(0.2))
    assert time.thread_time() - began > 0.15


def test_a_call_that_only_waits_ends_too():
    with pytest.raises(TimeoutError):
        call_with_alarm(time.sleep, ProcessorSeconds(0.02), 60)  # after 20 times that


@pytest.mark.process
def test_a_child_that_gets_no_processor_is_not_stopped():
    child = Child(work)
    pid, _ = child.call(5.0, "a")
    os.kill(pid, signal.SIGSTOP)
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {pid}"])
    assert child.call(ProcessorSeconds(0.5), "b")[0] == pid
    with pytest.raises(TimeoutError):
        child.call(ProcessorSeconds(0.3), "hang")
    assert child.gone
