"""Runs a server that must not outlive its owner: `python supervisor.py OWNER_PID COMMAND...`, standard library only.

The owner holds the other end of standard input. When that closes, or the owner is gone (SIGKILL included), or this
process gets a signal, the server's entire process group is ended: by SIGTERM, then by SIGKILL. Python's resource
trackers get that last: they end by themselves, after they have removed the semaphores of processes that were killed.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
GRACE_S = 2.0
TRACKER = b"multiprocessing.resource_tracker"


def end_group(group: int, reap) -> None:
    """End a process group and wait until none of it is left; `reap()` collects our own dead child."""
    for kill in (
        lambda: os.killpg(group, signal.SIGTERM),
        lambda: kill_all_but_trackers(group),
        lambda: os.killpg(group, signal.SIGKILL),
    ):
        try:
            kill()
        except ProcessLookupError:
            return
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until:
            reap()
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)


def kill_all_but_trackers(group: int) -> None:
    """SIGKILL the members of a process group; on systems without /proc none."""
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(ValueError, OSError):  # no process, or one that has ended
            if os.getpgid(int(name)) == group:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    if TRACKER not in file.read():
                        os.kill(int(name), signal.SIGKILL)


def guard(group: int) -> int:
    """Fork a detached process that ends the group when this process is gone; returns the pipe end that it watches.

    Ray kills a dead worker's children with SIGKILL, this supervisor among them, but not the server's own children.
    """
    read_end, write_end = os.pipe()
    first = os.fork()
    if first == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(write_end)
            os.close(sys.stdin.fileno())
            os.read(read_end, 1)
            end_group(group, lambda: None)
        os._exit(0)
    os.waitpid(first, 0)
    os.close(read_end)
    return write_end


def main() -> int:
    owner, command = int(sys.argv[1]), sys.argv[2:]
    stopping = []
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sign, lambda number, frame: stopping.append(number))
    # The kernel kills the child when this process ends, however that happens.
    libc = ctypes.CDLL(None, use_errno=True)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) if sys.platform == "linux" else None,
    )  # fmt: skip
    guard(child.pid)
    try:
        while child.poll() is None and not stopping and os.getppid() == owner:
            readable, _, _ = select.select([sys.stdin], [], [], 0.5)
            if readable and not os.read(sys.stdin.fileno(), 1):
                break
    finally:
        end_group(child.pid, child.poll)
    return child.returncode if child.returncode is not None and child.returncode >= 0 else 1


if __name__ == "__main__":
    sys.exit(main())
