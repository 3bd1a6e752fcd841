"""A supervised server ends with its owner, also when that is killed, and a server that fails is told by its log."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from verl.workers.rollout.spd.server import SUPERVISOR, LocalVllmServer, ServerError

# An owner that starts a supervised process (a shell with a child of its own), says the pids and sleeps.
OWNER = """
import os, subprocess, sys, time
script = "trap '' TERM; sleep 600 & wait; sleep 600"
command = [sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), "sh", "-c", script]
supervisor = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
print(supervisor.pid, flush=True)
time.sleep(600)
"""


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


def family_of(supervisor: psutil.Process) -> list[psutil.Process]:
    """Supervisor, shell and sleep, once they are there (and the fork that made the guard is not)."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        family = [supervisor, *supervisor.children(recursive=True)]
        if len(family) == 3 and "sleep" in [p.name() for p in family if p.is_running()]:
            return family
        time.sleep(0.05)
    raise AssertionError(f"the supervised processes did not start: {family}")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("victim", ["owner", "supervisor"])
def test_nothing_outlives_an_owner_or_supervisor_that_is_killed(victim, how):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(SUPERVISOR)], stdout=subprocess.PIPE, text=True)
    supervisor = psutil.Process(int(owner.stdout.readline()))
    family = family_of(supervisor)
    os.kill(owner.pid if victim == "owner" else supervisor.pid, how)
    _, alive = psutil.wait_procs(family[1:], timeout=10)
    assert not alive
    owner.kill()
    owner.wait(10)
    owner.stdout.close()
    assert gone(family, 10)


@pytest.mark.slow
def test_a_server_that_ends_at_once_is_told_with_its_log(tmp_path):
    server = LocalVllmServer(str(tmp_path / "no_model"), tmp_path / "log", 64, ["--no-such-option"])
    try:
        with pytest.raises(ServerError, match="ended with .*Last lines of"):
            server.wait_ready(120)
    finally:
        server.stop()
