"""Worker processes: order, failures by item, kills, replacements, memory, the end of the owner."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers import rewards
from verl.config.reward_model import RewardModelConfig
from verl.reward.managers.naive import NaiveRewardManager
from verl.reward.pool import ExternFunction, FatalGradingError, GradingPool

pytestmark = pytest.mark.process
HERE = "pkg://tests.helpers.rewards"
ROOT = Path(__file__).parents[2]


def items(*texts):
    return [{"data_source": "x", "solution_str": text, "ground_truth": "1"} for text in texts]


def test_results_keep_their_order_and_failures_stay_with_their_item():
    pool = GradingPool(ExternFunction(HERE, "score", {"bonus": 1}), workers=2, seconds=2.0)
    results = pool.map(items("a b", "hang", "c", "raise", "die", "d e f"))
    assert [r["score"] if isinstance(r, dict) else r.kind for r in results] == [3, "timeout", 2, "error", "error", 4]
    assert results[1].text == "took longer than 2 s and was killed"
    assert results[3].text == "raised KeyError: 'boom' (at tests/helpers/rewards.py:15, in score)"
    assert "exit code 3" in results[4].text
    assert pool.restarts == 2
    assert pool.map(items("a"))[0]["score"] == 2  # the pool is still usable

    async def cell():  # of a notebook, in whose event loop a caller may be
        return pool.map(items("a b"))

    assert asyncio.run(cell())[0]["score"] == 3
    pool.close()


def test_workers_work_in_parallel_stay_and_are_stopped():
    pool = GradingPool(rewards.process, workers=2, seconds=30)
    first, second = set(pool.map(items("a") * 8)), set(pool.map(items("a") * 8))
    assert len(first) == 2 and first == second and os.getpid() not in first
    pool.close()
    assert not any(psutil.pid_exists(int(pid)) for pid in first)


def test_a_worker_killed_while_idle_is_replaced():
    pool = GradingPool(rewards.process, workers=1, seconds=30)
    (first,) = pool.map(items("a"))
    os.kill(int(first), signal.SIGKILL)
    results = pool.map(items("a", "a"))
    assert results[0].text == "ended its process with exit code -9" and results[1] != first and pool.restarts == 1
    worker = psutil.Process(int(results[1]))
    del pool  # nobody closed it
    assert psutil.wait_procs([worker], timeout=10)[1] == []


def test_a_call_that_hangs_in_c_code_is_killed(tmp_path):
    file = tmp_path / "power.py"
    file.write_text("def power(exponent):\n    return (10 ** exponent) % 7\n")
    pool = GradingPool(ExternFunction(str(file), "power"), workers=1, seconds=3)
    began = time.monotonic()
    assert [getattr(r, "kind", r) for r in pool.map([{"exponent": 10**9}, {"exponent": 0}])] == ["timeout", 1]
    assert time.monotonic() - began < 60
    pool.close()


def test_an_answer_cannot_fill_the_memory(tmp_path):
    file = tmp_path / "greedy.py"
    file.write_text("def greedy(size):\n    return len(bytes(size))\n")
    pool = GradingPool(ExternFunction(str(file), "greedy"), workers=1, seconds=30)
    assert pool.map([{"size": 10}, {"size": 64 << 30}, {"size": 11}])[1].text.startswith("raised MemoryError")
    pool.close()


def test_a_function_that_processes_cannot_load_is_reported(tmp_path):
    file = tmp_path / "gone.py"
    file.write_text("def f():\n    return 0\n")
    function = ExternFunction(str(file), "f")
    file.unlink()
    with pytest.raises(FatalGradingError, match="could not load"):
        GradingPool(function, workers=1, seconds=5).map([{}])


def test_a_function_that_starts_processes_is_told_what_permits_it(tmp_path):
    file = tmp_path / "starts.py"
    file.write_text(
        "import multiprocessing\n\ndef score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    child = multiprocessing.get_context('fork').Process(target=int)\n"
        "    child.start()\n    child.join()\n    return float(child.exitcode == 0)\n"
    )
    function = ExternFunction(str(file), "score")
    pool = GradingPool(function, workers=1, seconds=30)
    (failure,) = pool.map(items("a"))
    assert failure.text.startswith("raised AssertionError: daemonic processes") and "starts.py:5" in failure.text
    assert "use threads or subprocess" in failure.text
    assert "rewards of a training run, reward_model.num_workers=0 permits it" in failure.text  # not in main_eval
    pool.close()
    manager = NaiveRewardManager(None, 0, function)
    manager.settings = RewardModelConfig(num_workers=0)
    assert not manager.in_processes and function(**items("a")[0]) == 1.0


def test_an_item_that_cannot_be_pickled_is_a_failure_of_its_own():
    pool = GradingPool(ExternFunction(HERE, "score"), workers=1, seconds=5.0)
    odd = {**items("a")[0], "solution_str": lambda: None}
    results = pool.map([odd, *items("a"), odd])
    assert [getattr(r, "kind", "") for r in results] == ["error", "", "error"] and "pickle" in results[0].text
    pool.close()


def test_no_worker_outlives_its_owner(tmp_path):
    """Also one whose call never ends, and an owner killed by SIGKILL, whose script is not run again by the workers."""
    file = tmp_path / "owner.py"
    file.write_text(
        "import multiprocessing\n"
        "from verl.reward.pool import ExternFunction, GradingPool\n"
        f"pool = GradingPool(ExternFunction({HERE!r}, 'score'), 2, 60.0)\n"
        "item = {'data_source': 'x', 'solution_str': 'hang', 'ground_truth': ''}\n"
        "pool.map([dict(item, solution_str='a')] * 2)\n"
        "print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)\n"
        "pool.map([item, item])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True, env=environment)
    workers = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    family = [*workers, *workers[0].parents()[:1]]  # the server they were forked from
    time.sleep(0.2)
    assert len(workers) == 2 and all(worker.is_running() for worker in workers)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    gone, alive = psutil.wait_procs(family, timeout=10)
    assert alive == [] and gone
