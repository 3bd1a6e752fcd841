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


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_an_owner_that_is_killed(how):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(SUPERVISOR)], stdout=subprocess.PIPE, text=True)
    supervisor = psutil.Process(int(owner.stdout.readline()))
    until = time.monotonic() + 10
    while len(supervisor.children(recursive=True)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    family = [supervisor, *supervisor.children(recursive=True)]
    assert len(family) == 3  # supervisor, shell, sleep
    os.kill(owner.pid, how)
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
