"""Processes of this one: calls, limits of time, memory and output, and the end with the owner, whatever their kind."""

import errno
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from tests.helpers.watched_runs import becomes
from verl.utils import children, supervisor

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
LIMITS = {"seconds": 60.0, "memory_bytes": 1 << 30, "processes": 8}
asked = []


class Refused(Exception):
    def __init__(self, what, number):
        super().__init__(f"{what} {number}")


def work(what):
    """Process and number of calls; or what the text says."""
    asked.append(what)
    if what == "hang":
        while True:
            pass
    if what == "die":
        os._exit(3)
    if what == "raise":
        raise KeyError("boom")
    if what == "refuse":
        raise Refused("door", 3)
    if what == "lock":
        raise KeyError(threading.Lock())
    if what == "lambda":
        return lambda: None
    if what.endswith("GiB"):
        return len(bytes(int(what.split()[0]) << 30))
    if what == "leave a process":
        return subprocess.Popen(["sleep", "600"]).pid
    if what == "fork":
        if (pid := os.fork()) == 0:
            time.sleep(600)
            os._exit(0)
        return pid
    return os.getpid(), len(asked)


def ended(*pids):
    """Whether processes end within 20 s."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs([p for p in processes if p.status() != psutil.STATUS_ZOMBIE], timeout=20)[1]


KINDS = {"forked": lambda: children.ForkedChild(work), "spawned": lambda: children.SpawnedChild(children.serve, work)}


@pytest.fixture(params=KINDS)
def start(request):
    """A function that starts a child of one kind, which serves calls of `work`."""
    return KINDS[request.param]


def test_a_child_stays_until_a_call_takes_too_long(start):
    child = start()
    pid, count = child.call(20.0, "a")
    assert pid == child.pid != os.getpid() and child.call(20.0, what="b") == (pid, count + 1) and not asked
    with pytest.raises(KeyError, match="boom"):
        child.call(20.0, "raise")
    with pytest.raises(AttributeError, match="pickle"):
        child.call(20.0, "lambda")
    with pytest.raises(AttributeError, match="pickle"):
        child.call(20.0, lambda: None)  # does not reach it
    assert child.call(20.0, "c") == (pid, count + 4) and not child.gone
    with pytest.raises(TimeoutError, match=f"{child.name} took longer than 0.3 s"):
        child.call(0.3, "hang")
    assert child.gone and not psutil.pid_exists(pid) and child.end() is None


def test_an_exception_that_cannot_be_sent_arrives_as_its_text(start):
    child = start()
    with pytest.raises(RuntimeError, match="^Refused: door 3$"):
        child.call(20.0, "refuse")  # pickle would call Refused("door 3")
    with pytest.raises(RuntimeError, match="^KeyError: <unlocked _thread.lock"):
        child.call(20.0, "lock")
    assert child.call(20.0, "a")[0] == child.pid and not child.gone
    child.end()


def test_a_child_that_dies_is_reported_with_its_exit_code(start):
    with pytest.raises(children.ChildDied, match="its process ended with exit code 3$") as caught:
        start().call(20.0, "die")
    assert caught.value.exit_code == 3
    child = start()
    os.kill(child.call(20.0, "a")[0], signal.SIGKILL)  # while it has nothing to do
    with pytest.raises(children.ChildDied, match="exit code -9"):
        child.call(20.0, "b")


def test_a_child_that_gets_no_processor_is_not_stopped(start):
    child = start()
    pid, _ = child.call(20.0, "a")
    os.kill(pid, signal.SIGSTOP)
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {pid}"])
    assert child.call(children.ProcessorSeconds(0.5), "b")[0] == pid
    with pytest.raises(TimeoutError):
        child.call(children.ProcessorSeconds(0.3), "hang")
    assert child.gone


def test_a_spawned_child_has_four_gibibytes_of_memory():
    child = children.SpawnedChild(children.serve, work)
    assert child.call(60.0, "2 GiB") == 2 << 30
    with pytest.raises(MemoryError):
        child.call(60.0, "5 GiB")
    assert child.call(20.0, "a")[0] == child.pid and child.end() == -9


@pytest.mark.parametrize("how", ["leave a process", "fork"])
def test_what_the_leader_of_a_group_started_ends_with_it(how):
    child = children.SpawnedChild(children.serve, work, leads_group=True)
    left = child.call(20.0, how)
    child.end()
    assert ended(left)
    child = children.SpawnedChild(children.serve, work, leads_group=True)
    left = child.call(20.0, how)
    os.kill(child.pid, signal.SIGKILL)  # not by this side: its guard sees it
    assert ended(left)


def test_starts_of_many_threads_do_not_keep_the_pipes_of_each_other():
    """A fork that inherits the other end of a child's connection would hide the end of the child."""
    problems = []

    def use(start):
        for _ in range(5):
            child = start()
            child.call(60.0, "a")
            began = time.monotonic()
            try:
                child.call(60.0, "die")
            except children.ChildDied as error:
                problems.extend([error.exit_code] if error.exit_code != 3 else [])
            problems.extend(["late"] if time.monotonic() - began > 30 else [])

    threads = [threading.Thread(target=use, args=(KINDS[kind],)) for kind in ("forked", "spawned") * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_a_forked_process_starts_others_though_a_thread_held_the_lock():
    held, free = threading.Event(), threading.Event()

    def hold():
        with children.PROCESS_STARTS:
            held.set()
            free.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    if (pid := os.fork()) == 0:
        code = 1
        try:
            with children.PROCESS_STARTS:
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    free.set()
    thread.join()


OWNER = """
import subprocess, sys, threading, time
from tests.utils.test_children import KINDS, LIMITS, PIPES
from verl.utils.children import supervised
kind = sys.argv[1]
if kind in KINDS:
    child = KINDS[kind]()
    print(child.pid, flush=True)
    child.call(600.0, "hang")
elif kind == "program":
    child = supervised(["sleep", "600"], {}, LIMITS, **PIPES)
else:
    child = supervised(["sleep", "600"], {})
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("kind", [*KINDS, "program", "server"])
def test_no_child_outlives_an_owner_that_is_killed(kind):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, kind], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    child = psutil.Process(int(owner.stdout.readline()))
    assert becomes(lambda: kind in KINDS or child.children())
    family = [child, *child.children(recursive=True)]
    time.sleep(0.2)
    assert child.is_running()
    owner.kill()
    assert psutil.wait_procs(family, timeout=20)[1] == []
    owner.communicate()


def outcome(command, limits, stdin=b""):
    """(report, standard output) of a supervised program; tests/agents/gateway/test_program.py has those that fail."""
    output = bytearray()

    def take(number, part):
        output.extend(part if number == 1 else b"")
        return True

    program = children.supervised(command, {"GIVEN": "7", "HOME": None}, limits, stdin=stdin, **PIPES)
    report = program.outputs(60.0, take)
    program.end(grace=10)
    return report.decode(), bytes(output)


def test_a_program_gets_its_input_and_reports_its_exit_code():
    script = 'cat; printf "$GIVEN${HOME-none}"; exit 5'
    report, output = outcome(["sh", "-c", script], LIMITS, stdin=b"x" * 300_000)
    assert report == '{"exit": 5, "stopped": null}' and output == b"x" * 300_000 + b"7none"
    report, output = outcome(["no-such-program"], LIMITS)
    assert report == '{"exit": 127, "stopped": null}' and output == b""


def test_a_fork_of_this_process_does_not_hold_back_the_end_of_the_input():
    program = children.supervised(["cat"], {}, LIMITS, stdin=b"abc", **PIPES)
    if (pid := os.fork()) == 0:  # as a data loader does while programs run
        time.sleep(60)
        os._exit(0)
    try:
        assert program.outputs(20.0, lambda *part: True) == b'{"exit": 0, "stopped": null}'
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        program.end()


def test_a_program_does_not_inherit_ignored_signals():
    script = "import signal; print([signal.getsignal(n) is signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGHUP)])"
    assert outcome([sys.executable, "-c", script], LIMITS)[1] == b"[True, True]\n"


def test_a_program_that_does_not_report_in_time_is_killed():
    program = children.Program([sys.executable, "-c", "import time; time.sleep(60)"], **PIPES)
    began = time.monotonic()
    assert program.outputs(0.5, lambda *part: True) == b"" and time.monotonic() - began < 20
    assert program.end(grace=0.2) == -9 and program.end() is None


def test_arguments_keep_their_names():
    child = children.ForkedChild(functools.wraps(work)(lambda **given: given))
    assert child.call(20.0, seconds=1, self=2) == {"seconds": 1, "self": 2}
    child.end()


def test_a_forked_child_that_would_outlive_its_parent_says_so(monkeypatch):
    refused = Mock(side_effect=OSError(errno.EPERM, "prctl(1, 9): Operation not permitted"))
    monkeypatch.setattr("verl.utils.children.end_with_parent", refused)
    child = children.ForkedChild(work)
    with pytest.raises(PermissionError, match=r"prctl\(1, 9\)"):
        child.call(20.0, "a")
    child.end()


def test_a_signal_that_the_kernel_refuses_is_an_error():
    with pytest.raises(OSError, match=r"prctl\(1, 9999\): Invalid argument"):
        supervisor.end_with_parent(9999)


def test_a_program_with_limits_does_not_start_where_the_kernel_lists_no_children(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(os.path, "exists", lambda path: not str(path).endswith("/children"))
    monkeypatch.setattr(signal, "signal", lambda *given: None)  # the handlers of this process stay
    read_end, write_end = os.pipe()
    supervisor.supervise(write_end, os.getppid(), LIMITS, ["touch", str(tmp_path / "ran")])
    assert os.read(read_end, 100)[4:] == b'{"exit": 127, "stopped": null}' and not (tmp_path / "ran").exists()
    assert "limits need /proc/PID/task/TID/children: use a Linux kernel with CONFIG_PROC_CHILDREN" in (
        capsys.readouterr().err
    )
    os.close(read_end)
    os.close(write_end)


def test_the_folder_of_a_session_whose_driver_ended_first_is_removed(tmp_path):
    driver, folder = subprocess.Popen(["true"]), tmp_path / "session"
    driver.wait()
    (folder / "sockets").mkdir(parents=True)
    supervisor.guard_ray_session(-1, driver.pid, str(folder))
    assert not folder.exists()
