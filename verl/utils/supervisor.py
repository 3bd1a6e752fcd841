"""Ends processes when the process that started them is gone, however it ended (SIGKILL included).

- `end_with_parent`, in the child: the kernel signals it when its parent is gone.
- `kill_when_closed`, in the child: the kernel kills it when a pipe is closed; for children of a fork server, which
  outlives the owner.
- `python supervisor.py OWNER_PID COMMAND...` runs a server. When the owner is gone, or this process gets a signal, the
  server's entire process group is ended: by SIGTERM, then by SIGKILL. Python's resource trackers get that last: they
  end by themselves, after they have removed the semaphores of processes that were killed.
- `python supervisor.py --ray-session OWNER_PID FOLDER` ends the Ray session that a killed driver leaves.

The owner of the two programs holds the other end of their standard input. Standard library only, but for psutil in the
last one: servers are supervised without the packages of the environment (`python -I -S`).
"""

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h
F_SETSIG = 10  # linux/fcntl.h
GRACE_S = 2.0
TRACKER = b"multiprocessing.resource_tracker"
LOOK_EVERY_S = 2.0  # processes that lose their parent are known from the last look
SESSION_GRACE_S = 3.0
_LIBC = ctypes.CDLL(None, use_errno=True)


def end_with_parent(number: int = signal.SIGTERM, parent: int | None = None) -> None:
    """Have the kernel send a signal to this process when the one that started it is gone (Linux; else nothing).

    `parent` is its process id, if it is known: a parent that ended before this call counts too. torchrun, for example,
    starts its ranks in sessions of their own: without this they would continue training when it is killed.
    """
    if sys.platform == "linux":
        parent = os.getppid() if parent is None else parent
        _LIBC.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the call
            os.kill(os.getpid(), number)


def kill_when_closed(descriptor: int) -> None:
    """Have the kernel kill this process when the other end of a pipe is closed (Linux).

    This also ends a call into a library that never runs Python code again.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)


def read_owner(seconds: float) -> bytes | None:
    """What the owner writes to standard input within `seconds`: None for nothing, b"" once it has closed its end."""
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1) if readable else None


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


def guard(group: int, *closed: int) -> int:
    """Fork a detached process that ends the group when this process is gone; returns the pipe end that it watches.

    It closes the descriptors `closed`, whose other ends would not see that this process is gone.

    Ray kills a dead worker's children with SIGKILL, this supervisor among them, but not the server's own children.
    """
    read_end, write_end = os.pipe()
    first = os.fork()
    if first == 0:
        os.setsid()
        if os.fork() == 0:
            for descriptor in (write_end, sys.stdin.fileno(), *closed):
                os.close(descriptor)
            os.read(read_end, 1)
            end_group(group, lambda: None)
        os._exit(0)
    os.waitpid(first, 0)
    os.close(read_end)
    return write_end


def supervise(owner: int, command: list[str]) -> int:
    """Run a server until it ends or the process `owner` is gone; its exit code."""
    stopping = []
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sign, lambda number, frame: stopping.append(number))
    me = os.getpid()
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=lambda: end_with_parent(signal.SIGKILL, me),
    )  # fmt: skip
    guard(child.pid)
    try:
        while child.poll() is None and not stopping and os.getppid() == owner and read_owner(0.5) != b"":
            pass
    finally:
        end_group(child.pid, child.poll)
    return child.returncode if child.returncode is not None and child.returncode >= 0 else 1


def guard_ray_session(owner_pid: int, folder: str) -> int:
    """Wait for the end of the process `owner_pid`; unless it wrote a byte before, end its descendants, delete `folder`.

    It writes the byte when it has ended its session itself. Every descendant gets a moment to end, then SIGKILL. Ray's
    own reaper ends the raylet, but its agents may wait half a minute for a GCS that is gone.
    """
    import psutil

    def below(processes):
        descendants = set()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                descendants |= set(process.children(recursive=True))
        return descendants - {psutil.Process()}

    owner = psutil.Process(owner_pid)
    known = below([owner])
    while (word := read_owner(LOOK_EVERY_S)) is None:
        known = {p for p in known if p.is_running()} | below([owner])
    if word:
        return 0
    known |= below([owner, *known])
    time.sleep(SESSION_GRACE_S)
    known |= below(list(known))
    for process in known:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # psutil compares start times: never a later process with the same number
    psutil.wait_procs(known, timeout=2.0)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--ray-session":
        sys.exit(guard_ray_session(int(sys.argv[2]), sys.argv[3]))
    sys.exit(supervise(int(sys.argv[1]), sys.argv[2:]))
