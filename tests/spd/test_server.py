"""A supervised server ends with its owner, SIGKILL included; errors of a server show the end of its log."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from recipe.spd.rollout.client import Completer
from recipe.spd.rollout.store import Completion, CompletionStore
from tests.helpers.watched_runs import becomes
from verl.rollout.server_process import LocalServerError, RunningServer
from verl.rollout.vllm_rollout.openai_server import LocalVllmServer
from verl.utils.accelerator import default_dtype
from verl.utils.children import supervised

# An owner that starts a supervised process (a shell with a child of its own), says the pids and sleeps.
OWNER = """
import time
from verl.utils.children import supervised
server = supervised(["sh", "-c", "trap '' TERM; sleep 600 & wait; sleep 600"], {})
print(server.pid, flush=True)
time.sleep(600)
"""


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


def family_of(supervisor: psutil.Process) -> list[psutil.Process]:
    """Supervisor, shell and sleep, once they are there (and the fork that made the guard is not)."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        family = [supervisor, *supervisor.children(recursive=True)]
        with contextlib.suppress(psutil.NoSuchProcess):
            if len(family) == 3 and "sleep" in [p.name() for p in family]:
                return family
        time.sleep(0.05)
    raise AssertionError(f"the supervised processes did not start: {family}")


@pytest.mark.process
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("victim", ["owner", "supervisor"])
def test_nothing_outlives_an_owner_or_supervisor_that_is_killed(victim, how):
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    supervisor = psutil.Process(int(owner.stdout.readline()))
    family = family_of(supervisor)
    os.kill(owner.pid if victim == "owner" else supervisor.pid, how)
    _, alive = psutil.wait_procs(family[1:], timeout=60)
    assert not alive
    owner.kill()
    owner.wait(10)
    owner.stdout.close()
    assert gone(family, 60)


HOLDER = """
import multiprocessing, os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = multiprocessing.get_context("spawn").Lock()
pathlib.Path(sys.argv[1]).write_text(lock._semlock.name)
time.sleep(600)
"""


@pytest.mark.process
def test_a_server_that_ignores_sigterm_leaves_no_semaphore(tmp_path):
    name = tmp_path / "name"
    server = supervised([sys.executable, "-c", HOLDER, str(name)], {})
    assert becomes(lambda: name.exists() and name.read_text())
    semaphore = Path("/dev/shm") / f"sem.{name.read_text().strip('/')}"
    assert semaphore.exists()
    server.end(grace=20)
    assert not semaphore.exists()


@pytest.mark.process
@pytest.mark.parametrize("reaped", [True, False])
def test_another_process_gets_the_log_of_a_server_that_has_ended(tmp_path, reaped):
    log = tmp_path / "a log"
    log.write_text("unknown model\n")
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and a zombie still
    if reaped:
        process.wait(10)
    handle = RunningServer(process.pid, "http://127.0.0.1:9", log).handle()
    with pytest.raises(LocalServerError, match="has ended.*Last lines of .*a log:\nunknown model"):
        RunningServer.from_handle(handle).wait_ready(60)
    process.wait(10)


@pytest.mark.process
def test_a_server_on_a_cpu_has_its_dtype_unless_an_argument_names_another(tmp_path):
    server = LocalVllmServer("model", tmp_path / "log", 64, ["--dtype", "float16"])
    server.stop()
    command = (tmp_path / "log").read_text().splitlines()[0].split()
    named = [command[at + 1] for at, word in enumerate(command) if word == "--dtype"]
    assert named == [default_dtype("cpu"), "float16"]


@pytest.mark.process
def test_a_server_sees_the_gpus_that_it_is_given(tmp_path):
    server = LocalVllmServer("model", tmp_path / "log", 64, gpus=["2", "5"])
    try:
        environment = {}
        while "CUDA_VISIBLE_DEVICES" not in environment:  # the process may not be the server yet
            time.sleep(0.01)
            environment = psutil.Process(server.pid).environ()
        assert environment["CUDA_VISIBLE_DEVICES"] == "2,5"
    finally:
        server.stop()


def test_the_start_timeout_counts_from_the_start_of_the_server(tmp_path):
    (tmp_path / "log").write_text("still loading\n")
    with pytest.raises(LocalServerError, match="not ready after 0 s .*\nstill loading"):
        RunningServer(os.getpid(), "http://127.0.0.1:9", tmp_path / "log").wait_ready(0)


def test_stored_completions_do_not_wait_for_the_server(tmp_path):
    class Client:
        def complete(self, requests, on_chunk):
            on_chunk(list(range(len(requests))), [Completion((len(ids), limit), False) for ids, limit in requests])

    waits = []
    completer = Completer(CompletionStore(tmp_path / "c", "model", {}), Client(), lambda: waits.append(1))
    first, second, third, shorter = ((5, 6), 9), ((7,), 9), ((8, 9, 10), 9), ((7,), 8)
    for requests, waited in (([first, second], 1), ([second], 1), ([second, third], 2), ([shorter], 3)):
        done, _ = completer.complete(requests)
        assert {r: made.token_ids for r, made in done.items()} == {(ids, n): (len(ids), n) for ids, n in requests}
        assert len(waits) == waited
    completer.store.close()
