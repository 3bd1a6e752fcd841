"""Ranks and drivers of running SPD trainings that are killed or stopped, each with real processes.

Not covered: a GPU, several nodes, a raylet that dies (make chaos).
"""

import os
import signal
import socket
import time

import psutil
import pytest

from tests.helpers.spd_run import QUICK, SPDRuns, driver_of, ended, ranks_of, running, tell
from verl.workers.rollout.spd.server import LocalVllmServer

STEPS = 10

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return SPDRuns(tmp_path_factory.mktemp("faults"), steps=STEPS, blocks=8 * STEPS)  # new completions in every step


@pytest.fixture(scope="module")
def server(runs):
    made = LocalVllmServer(runs.model, runs.directory / "server.log", 128)
    try:
        runs.urls = [made.wait_ready(300)]
        yield made
    finally:
        made.stop()


def test_a_killed_rank_ends_the_run_with_its_name(runs, server):
    with running(runs, "rank_killed", *QUICK) as run:
        runs.wait_for_step("rank_killed", 2, run)
        ranks_of(run)[0].kill()
        started = time.monotonic()
        assert ended(run, 60) == 1
        assert time.monotonic() - started < 30
    told = runs.log("rank_killed").rpartition("Training failed:")[2]
    assert "died while the group was in" in told and "rank" in told
    assert runs.saved_step("rank_killed") >= 1


def test_a_stopped_rank_is_found_by_the_watchdog(runs, server):
    limits = [f"trainer.watchdog.{phase}=10" for phase in ("generate", "log_prob", "update", "save")]
    with running(runs, "rank_stopped", "--ranks", "2", *QUICK, *limits) as run:
        runs.wait_for_step("rank_stopped", 2, run)
        stopped = ranks_of(run)[0]
        tell([stopped], signal.SIGSTOP)
        assert ended(run, 10 + 30) == 1
    log = runs.log("rank_stopped")
    told = log.rpartition("Training failed:")[2]
    assert "(stopped) did not finish" in told and "trainer.watchdog." in told
    assert told.count("(stopped)") == 1
    assert "most recent call first" in log  # the stacks of a rank that still runs
    assert not psutil.pid_exists(stopped.pid)


def listening(processes: list[psutil.Process]) -> set[int]:
    """TCP ports on which the processes listen."""
    found = set()
    for process in processes:
        try:
            found |= {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def orphans_of_shared_memory() -> set[str]:
    """Entries of /dev/shm that no living process has open or mapped; others may run beside this test."""
    before, held = set(os.listdir("/dev/shm")), set()
    for process in psutil.process_iter():
        try:
            held |= {file.path for file in process.open_files()} | {part.path for part in process.memory_maps()}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return {name for name in before & set(os.listdir("/dev/shm")) if f"/dev/shm/{name}" not in held}


def test_a_killed_driver_leaves_nothing_behind(runs):
    runs.urls = []  # this one starts a server of its own, which must go as well
    orphans_before = orphans_of_shared_memory()
    with running(runs, "driver_killed") as run:
        runs.wait_for_step("driver_killed", 2, run)
        mine = psutil.Process(run.pid).children(recursive=True)
        ports = listening(mine)
        assert len(mine) > 5 and len(ports) > 2
        tell([driver_of(run), psutil.Process(run.pid)], signal.SIGKILL)
        run.wait(10)
        time.sleep(10)
        left = [p for p in mine if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not left, [p.cmdline()[:3] for p in left]
        assert orphans_of_shared_memory() <= orphans_before
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, port
