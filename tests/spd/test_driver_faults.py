"""The driver of a running SPD training is killed: all processes and sockets that it started end.

Not covered: a GPU, several nodes, a raylet that dies (make chaos).
"""

import contextlib
import os
import socket
from pathlib import Path

import psutil
import pytest

from tests.helpers.spd_run import SPDRuns, running
from tests.helpers.watched_runs import becomes, listening

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(600)]


def shared_memory_of(processes: list[psutil.Process]) -> set[str]:
    """Entries of /dev/shm that one of these processes has mapped, by inode: sem_open renames what it maps."""
    mapped = set()
    for process in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            mapped |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    return {entry.name for entry in os.scandir("/dev/shm") if entry.inode() in mapped}


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_a_killed_driver_leaves_no_process_port_or_shared_memory(tmp_path):
    runs = SPDRuns(tmp_path, steps=10, blocks=80)  # without servers: it starts one, which must end as well
    with running(runs, "driver_killed") as run:
        runs.wait_for_step("driver_killed", 2, run)
        mine = psutil.Process(run.pid).children(recursive=True)
        ports = {port for *_, port in listening(mine)}
        others = [process for process in psutil.process_iter() if process not in mine]  # of concurrent tests
        shared = shared_memory_of(mine) - shared_memory_of(others)
        assert len(mine) > 5 and len(ports) > 2 and shared
        run.kill()
        run.wait(10)
        becomes(lambda: not any(map(alive, mine)) and not shared & set(os.listdir("/dev/shm")), 90)
        assert not (left := [p for p in mine if alive(p)]), left
        assert not shared & set(os.listdir("/dev/shm"))
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, port
