"""Faults in running SPD trainings, each with real processes: servers, ranks, the driver, the disk.

Not covered: a GPU, several nodes, a raylet that dies (make chaos).
"""

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.helpers.disks import small_disk
from tests.helpers.spd_run import SPDRuns, driver_of, ranks_of
from verl.utils.checkpoint.publish import verify_manifest
from verl.workers.rollout.spd.server import LocalVllmServer

STEPS = 10
TIMEOUT_S = 6
QUICK = (f"spd.rollout.timeout_s={TIMEOUT_S}", "spd.rollout.prompts_per_request=8", "spd.rollout.attempts=3")

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return SPDRuns(tmp_path_factory.mktemp("faults"), steps=STEPS, blocks=8 * STEPS)  # new completions in every step


@pytest.fixture(scope="module")
def servers(runs):
    """Two real servers of the model."""
    made = [LocalVllmServer(runs.model, runs.directory / f"server{i}.log", 128) for i in range(2)]
    try:
        runs.urls = [server.wait_ready(300) for server in made]
        yield made
    finally:
        for server in made:
            server.stop()


def everyone_of(server: LocalVllmServer) -> list[psutil.Process]:
    """vLLM's processes, without the supervisor."""
    return psutil.Process(server.pid).children(recursive=True)


def tell(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            continue


@contextmanager
def ten_times_slower(processes: list[psutil.Process]):
    """The processes may run for a tenth of the time."""
    done = threading.Event()

    def pulse() -> None:
        while not done.is_set():
            tell(processes, signal.SIGSTOP)
            done.wait(0.18)
            tell(processes, signal.SIGCONT)
            done.wait(0.02)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        tell(processes, signal.SIGCONT)


def assert_counted(rows: list[dict]) -> None:
    for row in rows:
        data = row["data"]
        kept, dropped = data["training/scored_samples"], data["training/dropped_samples"]
        assert data["training/requested_samples"] == kept + dropped == 8 * 4


def ended(run: subprocess.Popen, within: float) -> int:
    """The exit code; the run must be over after `within` seconds."""
    try:
        return run.wait(within)
    finally:
        if run.poll() is None:
            run.kill()


@contextmanager
def running(runs: SPDRuns, name: str, *more: str):
    """A run with a store of its own, dead after the block."""
    run = runs.start(name, *more, store=f"{name}.sqlite3")
    try:
        yield run
    finally:
        for process in [*psutil.Process(run.pid).children(recursive=True)] if run.poll() is None else []:
            tell([process], signal.SIGKILL)
        run.kill()
        run.wait(30)


def test_a_killed_rank_ends_the_run_with_its_name(runs, servers):
    with running(runs, "rank_killed", *QUICK) as run:
        runs.wait_for_step("rank_killed", 2, run)
        ranks_of(run)[0].kill()
        started = time.monotonic()
        assert ended(run, 60) == 1
        assert time.monotonic() - started < 30
    told = runs.log("rank_killed").rpartition("Training failed:")[2]
    assert "died while the group was in" in told and "rank" in told
    assert runs.saved_step("rank_killed") >= 1


def test_a_stopped_rank_is_found_by_the_watchdog(runs, servers):
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


def leave_free(disk: Path, count: int) -> None:
    """Fill a disk up to its last `count` bytes while others write to it."""
    with open(disk / "filler", "wb", buffering=0) as filler:
        while (free := shutil.disk_usage(disk).free) > count:
            filler.write(b"x" * min(free - count, 1 << 20))


def test_a_full_disk_in_a_save_keeps_the_checkpoint_before_it(runs, servers):
    with small_disk(runs.directory / "disk_full", "64m") as disk:
        with running(runs, "disk_full", *QUICK) as run:
            runs.wait_for_step("disk_full", 2, run)
            leave_free(disk, 300_000)
            assert ended(run, 120) == 1
        told = runs.log("disk_full").rpartition("Training failed:")[2]
        kept = runs.saved_step("disk_full")
        assert "no room for the checkpoint" in told and str(disk) in told and "bytes" in told
        assert kept >= 1
        verify_manifest(disk / f"global_step_{kept}")
        assert not list(disk.glob("*.tmp"))


def test_servers_that_hang_crawl_and_die_lose_no_sample(runs, servers):
    run = runs.start("servers", *QUICK)
    first = everyone_of(servers[0])
    runs.wait_for_step("servers", 1, run)
    tell(first, signal.SIGSTOP)
    runs.wait_for_step("servers", 3, run)
    tell(first, signal.SIGCONT)
    with ten_times_slower(first):
        runs.wait_for_step("servers", 5, run)
    runs.wait_for_step("servers", 6, run)
    tell(first, signal.SIGKILL)
    assert ended(run, 200) == 0, runs.log("servers")[-3000:]
    rows = runs.rows("servers")
    assert len(rows) == STEPS
    assert_counted(rows)
    for row in rows:
        assert row["data"]["training/scored_samples"] == 8 * 4 and row["data"]["spd/completions/failed"] == 0
        assert row["data"]["spd/completions/asked"] > 0  # every step needed a server
        assert row["data"]["timing_s/gen"] < TIMEOUT_S + 10
    assert "attempt 1 of 3 failed: TimeoutError" in runs.log("servers")


def test_with_no_server_left_the_run_ends_with_its_checkpoint_kept(runs, servers):
    # The first server is dead already.
    run = runs.start("alone", *QUICK, store="alone.sqlite3")
    runs.wait_for_step("alone", 2, run)
    tell(everyone_of(servers[1]), signal.SIGKILL)
    assert ended(run, 120) == 1
    told = runs.log("alone").rpartition("Training failed:")[2]
    assert "have no completion from the servers" in told and "completions made so far are kept" in told
    assert runs.saved_step("alone") >= 2
    assert len(runs.rows("alone")) >= runs.saved_step("alone")


def listening(processes: list[psutil.Process]) -> set[int]:
    """TCP ports on which the processes listen."""
    found = set()
    for process in processes:
        try:
            found |= {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_a_killed_driver_leaves_nothing_behind(runs):
    runs.urls = []  # this one starts a server of its own, which must go as well
    shared_before = set(os.listdir("/dev/shm"))
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
    assert set(os.listdir("/dev/shm")) <= shared_before
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, port
