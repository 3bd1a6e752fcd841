"""Worker processes: order, faults by item, kills, replacements, memory, the end of the owner."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers import rewards
from verl.grading.pool import ExternFunction, Failure, FatalGradingError, GradingPool, Slots

HERE = "pkg://tests.helpers.rewards"
ROOT = Path(__file__).parents[2]


def items(*texts):
    return [{"data_source": "x", "solution_str": text, "ground_truth": "1"} for text in texts]


def test_results_keep_their_order_and_faults_stay_with_their_item():
    pool = GradingPool(ExternFunction(HERE, "score", {"bonus": 1}), workers=2, seconds=2.0)
    found = pool.map(items("a b", "hang", "c", "raise", "die", "d e f"))
    assert [f["score"] if isinstance(f, dict) else f.kind for f in found] == [3, "timeout", 2, "error", "error", 4]
    assert found[1].text == "took longer than 2 s and was killed"
    assert found[3].text == "raised KeyError: 'boom'" and "exit code 3" in found[4].text
    assert pool.restarts == 2
    assert pool.map(items("a"))[0]["score"] == 2  # the pool goes on
    workers = [worker.process.pid for worker in pool._idle]
    pool.close()
    assert workers and not any(map(psutil.pid_exists, workers))


def test_workers_work_side_by_side_and_stay():
    pool = GradingPool(rewards.process, workers=2, seconds=30)
    first, second = set(pool.map(items("a") * 4)), set(pool.map(items("a") * 4))
    assert len(first) == 2 and first == second and os.getpid() not in first
    pool.close()


def test_an_answer_cannot_fill_the_memory(tmp_path):
    file = tmp_path / "greedy.py"
    file.write_text("def greedy(size):\n    return len(bytes(size))\n")
    pool = GradingPool(ExternFunction(str(file), "greedy"), workers=1, seconds=30)
    assert pool.map([{"size": 10}, {"size": 64 << 30}, {"size": 11}])[1].text.startswith("raised MemoryError")
    pool.close()


def test_what_cannot_travel_is_a_fault_of_its_item():
    pool = GradingPool(rewards.slow, workers=1, seconds=30)
    found = pool.map([{"solution_str": lambda: 0}, {"solution_str": "a"}])
    assert isinstance(found[0], Failure) and found[0].kind == "error" and found[1] == 1.0
    pool.close()


def test_a_function_that_processes_cannot_load_is_told(tmp_path):
    file = tmp_path / "gone.py"
    file.write_text("def f():\n    return 0\n")
    function = ExternFunction(str(file), "f")
    file.unlink()
    with pytest.raises(FatalGradingError, match="could not load"):
        GradingPool(function, workers=1, seconds=5).map([{}])


def test_slots_are_counted_in_each_process_anew():
    slots = Slots(2)
    assert slots.acquire() and slots.__reduce__() == (Slots, (2,))


def test_an_item_that_cannot_travel_is_a_failure_of_its_own():
    pool = GradingPool(ExternFunction(HERE, "score"), workers=1, seconds=5.0)
    odd = {**items("a")[0], "solution_str": lambda: None}
    assert [found.kind for found in pool.map([odd])] == ["error"]
    assert [isinstance(found, Failure) for found in pool.map([odd, *items("a"), odd])] == [True, False, True]
    pool.close()


def test_no_worker_outlives_its_owner(tmp_path):
    """Also one whose call never ends, and an owner killed by SIGKILL, whose script is not run again by the workers."""
    file = tmp_path / "owner.py"
    file.write_text(
        "import threading, time\n"
        "from verl.grading.pool import ExternFunction, GradingPool\n"
        f"pool = GradingPool(ExternFunction({HERE!r}, 'score'), 1, 60.0)\n"
        "item = {'data_source': 'x', 'solution_str': 'hang', 'ground_truth': ''}\n"
        "pool.map([dict(item, solution_str='a')])\n"
        "print(pool._idle[0].process.pid, flush=True)\n"
        "pool.map([item])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True, env=environment)
    worker = psutil.Process(int(owner.stdout.readline()))
    family = [worker, *worker.parents()[:1]]  # the server it was forked from
    time.sleep(0.2)
    assert worker.is_running()
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    gone, alive = psutil.wait_procs(family, timeout=10)
    assert alive == [] and gone
