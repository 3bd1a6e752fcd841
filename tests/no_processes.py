"""pytest plugin of `make test-quick`: a test that starts a process fails, unless it is marked `process`.

Watches Python's audit events for subprocess.Popen, fork and posix_spawn, and the call below them that multiprocessing
makes for `spawn` and `forkserver`.
"""

import _posixsubprocess
import os
import platform
import sys

import pytest

EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"}
QUERIES = ("file", "git")  # commands that answer a question about machine or tree at once
RENDERER = "template_process.py"  # renders every chat template, starts in a tenth of a second
started: list[str] | None = None  # what the current test started; None between tests


def note(what: str) -> None:
    if started is not None:
        started.append(what)
        raise RuntimeError(f"{what}: a test of `make test-quick` starts no process; mark it with pytest.mark.process")


def allowed(command: list) -> bool:
    return command[0] in QUERIES or any(os.fsdecode(word).endswith(RENDERER) for word in command)


def watch(event: str, args: tuple) -> None:
    if event in EVENTS and not (event == "subprocess.Popen" and allowed(args[1])):
        note(f"{event} {args[:1]}")


def pytest_configure() -> None:
    platform.platform()  # starts `uname` on the first call of a process, and caches its answer
    sys.addaudithook(watch)
    fork_exec = _posixsubprocess.fork_exec

    def watched(*args):
        if not allowed([os.fsdecode(word) for word in args[0]]):
            note(f"fork_exec {args[0]}")
        return fork_exec(*args)

    _posixsubprocess.fork_exec = watched


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    global started
    started = []
    try:
        return (yield)
    finally:
        started = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if started and report.passed:  # the code under test caught the error
        report.outcome, report.longrepr = "failed", f"started a process: {', '.join(started)}"
    return report
