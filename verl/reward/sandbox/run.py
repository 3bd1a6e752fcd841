"""Runs one Python program in the sandbox."""

import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from verl.config.sandbox import SandboxConfig
from verl.reward.pool import FatalGradingError

_JAIL = str(Path(__file__).with_name("jail.py"))
_PYTHON = os.path.realpath(sys.executable)
# What the program can read: the interpreter, its library and the system's; nothing of the user, no /etc, no /proc.
_VISIBLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", f"{sys.base_prefix}/lib", _PYTHON)
_GRACE_S = 15.0  # for the jail to start and to report, beyond the program's own time
_KEPT_OF_STDERR = 16 << 10


class SandboxUnavailable(FatalGradingError):
    """This machine does not support the confinement; the message says which part, and what to do."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended. `stopped`: None, or why it was killed: 'time', 'output'. Exit codes below 0 are signals."""

    stdout: bytes
    stderr: bytes
    exit_code: int
    stopped: str | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0. Says nothing about the output: a program chooses its code."""
        return self.stopped is None and self.exit_code == 0


def run_python(program: str, stdin: bytes = b"", limits: SandboxConfig | None = None) -> Outcome:
    """Run the source of a Python program on `stdin`; it can import the standard library only.

    It is killed after `limits.seconds`, or when it wrote more than `limits.output_kb` to stdout; one larger than
    `limits.disk_mb` fails with exit code 1. Raises SandboxUnavailable when the kernel refuses a layer of the
    confinement and `limits.unconfined` is false.
    """
    limits = limits or SandboxConfig()
    size, room = len(program.encode("utf-8", "surrogatepass")), limits.disk_mb << 20
    if size > room:  # the machine can confine it; its file does not fit
        return Outcome(b"", f"the program has {size} bytes, sandbox.disk_mb allows {room}".encode(), 1, None, 0.0)
    folder = tempfile.mkdtemp(prefix="verl-sandbox-") if limits.unconfined else None
    request = {name: limits[name] for name in limits if name != "_target_"}
    request |= {"program": program, "python": _PYTHON, "visible": list(_VISIBLE), "folder": folder}
    parent_end, child_end = socket.socketpair()
    try:
        with parent_end:
            with child_end:
                process = subprocess.Popen(
                    [_PYTHON, "-I", "-S", _JAIL, str(child_end.fileno())], pass_fds=[child_end.fileno()], env={},
                    cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    start_new_session=True,
                )  # fmt: skip
            with process:
                try:
                    return _exchange(process, parent_end, json.dumps(request).encode(), stdin, limits)
                finally:
                    parent_end.close()  # the jail kills its program then; a jail that hangs is killed itself
                    try:
                        process.wait(timeout=_GRACE_S)
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)  # the program follows by its death signal
                        process.wait()
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _exchange(
    process: subprocess.Popen, control: socket.socket, request: bytes, stdin: bytes, limits: SandboxConfig
) -> Outcome:
    """Send the request, write stdin, read the outputs up to their limits, wait for the report."""
    room = {process.stdout: limits.output_kb << 10, process.stderr: _KEPT_OF_STDERR}  # bytes that are still kept
    taken = {pipe: bytearray() for pipe in room}
    rest, report, overflow = memoryview(stdin), None, False
    deadline = time.monotonic() + limits.seconds + _GRACE_S
    with selectors.DefaultSelector() as selector:
        for file, events in ((process.stdout, selectors.EVENT_READ), (process.stderr, selectors.EVENT_READ),
                             (process.stdin, selectors.EVENT_WRITE)):  # fmt: skip
            os.set_blocking(file.fileno(), False)
            selector.register(file, events)
        selector.register(control, selectors.EVENT_READ)
        try:
            control.sendall(len(request).to_bytes(8, "big") + request)
        except BrokenPipeError:
            pass  # the jail did not start; its stderr is reported below
        while report is None or any(pipe in selector.get_map() for pipe in taken):
            ready = selector.select(max(0.0, deadline - time.monotonic()) if report is None else 0.0)
            if not ready:
                break  # no report in time, or another process keeps a pipe open and writes nothing
            for pipe in [key.fileobj for key, _ in ready]:
                if pipe is control:
                    report = control.recv(1 << 16)
                    selector.unregister(control)
                elif pipe is process.stdin:
                    try:
                        rest = rest[os.write(pipe.fileno(), rest[: 1 << 16]) :]
                    except BrokenPipeError:
                        rest = rest[:0]  # the program closed its stdin
                    if not rest:
                        selector.unregister(pipe)
                        pipe.close()
                elif pipe in selector.get_map():  # an overflow of stdout ends reading of both pipes
                    part = os.read(pipe.fileno(), 1 << 16)
                    kept = part[: room[pipe]]
                    taken[pipe] += kept
                    room[pipe] -= len(kept)
                    if not part:
                        selector.unregister(pipe)
                    elif pipe is process.stdout and len(kept) < len(part):  # of stderr the rest is discarded
                        overflow = True
                        control.shutdown(socket.SHUT_WR)  # ends the program
                        for other in [p for p in taken if p in selector.get_map()]:
                            selector.unregister(other)
    stdout, stderr = (bytes(kept) for kept in taken.values())
    ended = json.loads(report) if report else {"refused": f"no report; {stderr.decode(errors='replace')}"}
    if "refused" in ended:
        raise SandboxUnavailable(
            f"this machine cannot confine programs ({ended['refused'].strip()}). Allow user namespaces and "
            "Landlock here, name a remote service in reward_model.sandbox_fusion.url, or set "
            "reward_model.sandbox.unconfined=true to run model-written code with resource limits alone."
        )
    stopped = "output" if overflow else "time" if ended["timeout"] else None
    return Outcome(stdout, stderr, ended["exit"], stopped, ended["seconds"])
