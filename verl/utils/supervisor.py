"""Ends processes when the process that started them is gone, however it ended (SIGKILL included).

- `end_with_parent`, in the child: the kernel signals it when its parent is gone.
- `kill_when_closed`, in the child: the kernel kills it when a pipe is closed; for children of a fork server, which
  outlives the owner.
- `python supervisor.py DESCRIPTOR '{"owner": PID, "limits": null}' COMMAND...` runs a program, see `supervise`.
- `python supervisor.py --ray-session DESCRIPTOR OWNER_PID FOLDER` ends the Ray session that a killed driver leaves.

The owner holds the other end of the descriptor, as `verl.utils.children.Program`. Standard library only, but for psutil
in the last one: programs are supervised without the packages of the environment (`python -I -S`).
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
F_SETSIG = 10  # linux/fcntl.h
GRACE_S = 2.0
TRACKER = b"multiprocessing.resource_tracker"
LOOK_EVERY_S = 0.1
SESSION_LOOK_EVERY_S = 2.0  # for descendants: one that loses its parent is known only if it was seen before
SESSION_GRACE_S = 3.0
PAGE = os.sysconf("SC_PAGE_SIZE")
_LIBC = ctypes.CDLL(None, use_errno=True)


def end_with_parent(number: int = signal.SIGTERM, parent: int | None = None) -> None:
    """Have the kernel send a signal to this process when the one that started it is gone (Linux; else nothing).

    `parent` is its process id, if it is known: a parent that ended before this call counts too. torchrun, for example,
    starts its ranks in sessions of their own: without this they would continue training when it is killed.
    """
    if sys.platform == "linux":
        parent = os.getppid() if parent is None else parent
        _prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it ended before the call
            os.kill(os.getpid(), number)


def kill_when_closed(descriptor: int) -> None:
    """Have the kernel kill this process when the other end of a pipe is closed (Linux), also if that was before.

    This also ends a call into a library that never runs Python code again. Nothing is written to the pipe.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    closed = select.poll()
    closed.register(descriptor, select.POLLIN)
    if closed.poll(0):  # the kernel signals changes only
        os.kill(os.getpid(), signal.SIGKILL)


def guard(group: int, *closed: int) -> None:
    """Fork a detached process that ends a process group when this process is gone.

    A killed supervisor cannot end its program itself: Ray sends SIGKILL to a dead worker's children, but not to theirs.
    The guard closes the descriptors `closed`, whose other ends would otherwise not see that this process is gone.
    """
    read_end, write_end = os.pipe()  # the guard waits until no process holds write_end
    first = os.fork()
    if first == 0:
        os.setsid()
        if os.fork() == 0:
            for descriptor in (write_end, *closed):
                os.close(descriptor)
            os.read(read_end, 1)
            _end_group(group, lambda: None)
        os._exit(0)
    os.waitpid(first, 0)
    os.close(read_end)
    os.register_at_fork(after_in_child=lambda: os.close(write_end))


def supervise(channel: int, owner: int, limits: dict[str, float] | None, command: list[str]) -> None:
    """Run a program until it ends, a limit is exceeded, or the process `owner` is gone or sends a message; then report.

    With limits {seconds, memory_bytes, processes}, which hold for all processes of the program together and are
    compared ten times a second, this process is the subreaper of the program: processes that detach themselves are its
    children as well, and are killed too. Without limits the program is a server, whose process group is ended gently,
    also when this process is killed or gets a signal. The report: {exit, stopped}, the exit code (below 0 for a
    signal, 127 if the program cannot start), and null or why the program was ended.
    """
    stopping: list[int] = []
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # not SIG_IGN: the program would inherit that
        signal.signal(sign, lambda number, frame: stopping.append(number))
    me, stopped = os.getpid(), None
    deadline = time.monotonic() + (limits["seconds"] if limits else float("inf"))
    try:
        if limits:
            if not os.path.exists(f"/proc/{me}/task/{me}/children"):
                raise OSError("limits need /proc/PID/task/TID/children: use a Linux kernel with CONFIG_PROC_CHILDREN")
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
        child = subprocess.Popen(
            command, stdin=None if limits else subprocess.DEVNULL, start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGKILL, me),
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:  # the latter if prctl fails in the child
        sys.stderr.write(str(error))
        _report(channel, exit=127, stopped=None)
        return
    if not limits:
        guard(child.pid, channel)
    try:
        while child.poll() is None and stopped is None:
            wait = min(LOOK_EVERY_S, max(0.0, deadline - time.monotonic()))
            if select.select([channel], [], [], wait)[0] or os.getppid() != owner:
                stopped = "owner"
            elif limits:
                stopped = _exceeded(limits, deadline)
            elif stopping:
                stopped = "signal"
        code = child.poll()
    finally:
        if limits:
            _end_descendants()
        else:
            _end_group(child.pid, child.poll)
    _report(channel, exit=-signal.SIGKILL if code is None else code, stopped=stopped)


def _exceeded(limits: dict[str, float], deadline: float) -> str | None:
    """The limit that the descendants of this process exceed, as reports name it; None if they keep all."""
    pids = _descendants(os.getpid())
    if len(pids) > limits["processes"]:
        return "processes"
    if _memory_of(pids) > limits["memory_bytes"]:
        return "memory"
    return "time" if time.monotonic() >= deadline else None


def guard_ray_session(channel: int, owner_pid: int, folder: str) -> None:
    """Wait for the end of the process `owner_pid`; unless it sent a message, end its descendants, delete `folder`.

    It sends the message when it has ended its session itself. Every descendant gets a moment to end, then SIGKILL.
    Ray's own reaper ends the raylet, but its agents may wait half a minute for a GCS that is gone.
    """
    import psutil

    def below(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
        found: set[psutil.Process] = set()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                found |= set(process.children(recursive=True))
        return found - {psutil.Process()}

    try:
        owner = psutil.Process(owner_pid)
    except psutil.NoSuchProcess:  # it was killed before this process started, and its descendants are unknown
        shutil.rmtree(folder, ignore_errors=True)
        return
    known = below([owner])
    while not select.select([channel], [], [], SESSION_LOOK_EVERY_S)[0]:
        known = {p for p in known if p.is_running()} | below([owner])
    if os.read(channel, 1):
        return
    known |= below([owner, *known])
    time.sleep(SESSION_GRACE_S)
    known |= below(list(known))
    for process in known:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            process.kill()  # psutil compares start times: never a later process with the same number
    psutil.wait_procs(known, timeout=2.0)
    shutil.rmtree(folder, ignore_errors=True)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def _end_group(group: int, reap: Callable[[], object]) -> None:
    """End a process group, by SIGKILL what is left of it after GRACE_S; `reap()` collects our own dead child."""
    for kill in (
        lambda: os.killpg(group, signal.SIGTERM),
        lambda: _kill_all_but_trackers(group),
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


def _kill_all_but_trackers(group: int) -> None:
    """SIGKILL the members of a process group but for Python's resource trackers; on systems without /proc none.

    Trackers end by themselves, after they have removed the semaphores of processes that were killed.
    """
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(ValueError, OSError):  # no process, or one that has ended
            if os.getpgid(int(name)) == group:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    if TRACKER not in file.read():
                        os.kill(int(name), signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
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


def _memory_of(pids: list[int]) -> int:
    """Bytes of memory in use by processes; pages that they share count for each of them."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/statm") as file:  # it has ended
            pages += int(file.read().split()[1])
    return pages * PAGE


def _end_descendants() -> None:
    """Kill all descendants: they are stopped first, so that they start no others meanwhile."""
    while pids := _descendants(os.getpid()):
        for sign in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(OSError):  # it has ended
                    os.kill(pid, sign)
        with contextlib.suppress(ChildProcessError):  # none is left
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def _report(channel: int, **content: object) -> None:
    """Send the owner a message as connections of multiprocessing do, unless it is gone."""
    message = json.dumps(content).encode()
    with contextlib.suppress(OSError):  # it is gone
        os.write(channel, len(message).to_bytes(4, "big") + message)


if __name__ == "__main__":
    if sys.argv[1] == "--ray-session":
        guard_ray_session(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        supervise(int(sys.argv[1]), command=sys.argv[3:], **json.loads(sys.argv[2]))
