"""Limits of the time of calls in place, by a forked process, and of processor time."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from verl.data.time_limit import call_interruptibly, timeout_limit
from verl.utils.children import ChildDied, ForkedChild, ProcessorSeconds

ROOT = Path(__file__).parents[2]


def spin():
    while True:
        pass


@pytest.mark.process
def test_a_call_that_ends_its_process_is_reported_with_the_exit_code():
    def leave():
        os._exit(3)

    with pytest.raises(ChildDied, match=r"leave: its process ended with exit code 3$"):
        timeout_limit(5.0)(leave)()


@pytest.mark.process
def test_an_answer_that_was_not_waited_for_is_not_that_of_the_next_call():
    child = ForkedChild(spin)
    with pytest.raises(TimeoutError, match="took longer than 0.2 s"):
        timeout_limit(0.2, use_signals=True)(child.call)(30.0)
    assert child.gone


def test_a_call_cannot_swallow_the_signal():
    def stubborn():
        while True:
            try:
                spin()
            except Exception:
                continue

    with pytest.raises(TimeoutError):
        timeout_limit(0.2, use_signals=True)(stubborn)()


def in_another_thread(call, *args):
    results = []

    def run():
        try:
            results.append(call(*args))
        except TimeoutError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


@pytest.mark.parametrize("run", [lambda call, *args: call(*args), in_another_thread])
def test_processor_time_does_not_pass_while_a_call_waits(run):
    assert run(call_interruptibly, lambda: time.sleep(0.4) or "done", ProcessorSeconds(0.1)) == "done"
    began = time.process_time()
    with pytest.raises(TimeoutError, match="spin took longer than 0.2 s"):
        run(call_interruptibly, spin, ProcessorSeconds(0.2))
    assert time.process_time() - began > 0.15


def test_a_call_that_only_waits_ends_too():
    with pytest.raises(TimeoutError):
        call_interruptibly(time.sleep, ProcessorSeconds(0.02), 60)  # after 20 times that


@pytest.mark.process
def test_mathematics_is_compared_without_torch():
    script = (
        "import sys\n"
        "from verl.reward.rules import default_compute_score\n"
        "print(default_compute_score('lighteval/MATH', '\\\\boxed{2+2}', '4'), 'torch' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout == "1.0 False\n", ran.stderr
