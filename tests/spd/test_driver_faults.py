"""The driver of a running SPD training is killed: nothing that it started outlives it.

Not covered: a GPU, several nodes, a raylet that dies (make chaos).
"""

import os
import signal
import socket
import time

import psutil
import pytest

from tests.helpers.spd_run import SPDRuns, drivers_of, running, tell
from tests.helpers.watched_runs import listening

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]


def orphans_of_shared_memory() -> set[str]:
    """Entries of /dev/shm that no living process has open or mapped; others may run beside this test."""
    before, held = set(os.listdir("/dev/shm")), set()
    for process in psutil.process_iter():
        try:
            held |= {file.path for file in process.open_files()} | {part.path for part in process.memory_maps()}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return {name for name in before & set(os.listdir("/dev/shm")) if f"/dev/shm/{name}" not in held}


def test_a_killed_driver_leaves_nothing_behind(tmp_path):
    runs = SPDRuns(tmp_path, steps=10, blocks=80)  # without servers: it starts one, which must go as well
    orphans_before = orphans_of_shared_memory()
    with running(runs, "driver_killed") as run:
        runs.wait_for_step("driver_killed", 2, run)
        mine = psutil.Process(run.pid).children(recursive=True)
        ports = {port for *_, port in listening(mine)}
        assert len(mine) > 5 and len(ports) > 2
        (driver,) = drivers_of(run)
        tell([driver, psutil.Process(run.pid)], signal.SIGKILL)
        run.wait(10)
        time.sleep(10)
        left = [p for p in mine if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not left, [p.cmdline()[:3] for p in left]
        assert orphans_of_shared_memory() <= orphans_before
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, port
