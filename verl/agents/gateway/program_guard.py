"""Runs one program and ends all of its processes: `python -I -S program_guard.py DESCRIPTOR COMMAND...`.

The descriptor is one end of a socket pair. Its owner sends the limits as a line of JSON, {seconds, memory_bytes,
processes}, and gets {exit, stopped} as a line when the program has ended: its exit code (below 0 for a signal), and
null or which limit it exceeded. When the owner closes its end, or is gone, the program is ended.

The guard is the subreaper of the program: processes that detach themselves are its children as well, and are ended
too. The limits hold for all processes of the program together; they are compared ten times a second. Standard library
only.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
LOOK_EVERY_S = 0.1
PAGE = os.sysconf("SC_PAGE_SIZE")
_LIBC = ctypes.CDLL(None, use_errno=True)


def descendants(pid: int) -> list[int]:
    """The process ids of all children of a process, and of theirs."""
    pids, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    children = [int(child) for child in file.read().split()]
                pids += children
                waiting += children
    return pids


def memory_of(pids: list[int]) -> int:
    """Bytes of memory in use by processes; pages that they share count for each of them."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/statm") as file:
            pages += int(file.read().split()[1])
    return pages * PAGE


def reap() -> None:
    """Collect children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_all() -> None:
    """Kill all descendants: they are stopped first, so that they start no others meanwhile."""
    while pids := descendants(os.getpid()):
        for sign in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, sign)
        reap()
        time.sleep(0.002)


def run(owner: socket.socket, command: list[str]) -> None:
    """Start the program, wait for its end or that of the owner, and report."""
    limits = json.loads(owner.makefile().readline() or "null")
    if limits is None:
        return
    deadline = time.monotonic() + limits["seconds"]
    me = os.getpid()

    def end_with_guard() -> None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != me:
            os._exit(1)

    try:
        child = subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_guard)
    except OSError as error:
        owner.sendall(json.dumps({"exit": 127, "stopped": None, "error": str(error)}).encode() + b"\n")
        return
    stopped, ended = None, None
    try:
        while ended is None and stopped is None:
            readable, _, _ = select.select([owner], [], [], min(LOOK_EVERY_S, max(0.0, deadline - time.monotonic())))
            if readable:
                return  # the owner has closed its end
            pids = descendants(me)
            if len(pids) > limits["processes"]:
                stopped = "processes"
            elif memory_of(pids) > limits["memory_bytes"]:
                stopped = "memory"
            elif time.monotonic() >= deadline:
                stopped = "time"
            ended = child.poll()
    finally:
        end_all()
    code = child.wait() if ended is None else ended
    with contextlib.suppress(OSError):
        owner.sendall(json.dumps({"exit": code, "stopped": stopped}).encode() + b"\n")


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the owner ends the guard by closing its end
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    run(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
