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
from verl.grading.pool import FatalGradingError

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

    It is killed after `limits.seconds`, or when it wrote more than `limits.output_kb` to stdout. Raises
    SandboxUnavailable when the kernel refuses a layer of the confinement and `limits.unconfined` is false.
    """
    limits = limits or SandboxConfig()
    folder = tempfile.mkdtemp(prefix="verl-sandbox-") if limits.unconfined else None
    request = {name: limits[name] for name in limits if name != "_target_"}
    request |= {"program": program, "python": _PYTHON, "visible": list(_VISIBLE), "folder": folder}
    ours, theirs = socket.socketpair()
    try:
        with ours:
            with theirs:
                process = subprocess.Popen(
                    [_PYTHON, "-I", "-S", _JAIL, str(theirs.fileno())], pass_fds=[theirs.fileno()], env={}, cwd="/",
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                )  # fmt: skip
            with process:
                try:
                    return _Exchange(process, ours, stdin, limits).run(request)
                finally:
                    _end(process, ours)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _end(process: subprocess.Popen, control: socket.socket) -> None:
    """The jail kills its program when the control socket closes; a jail that hangs is killed itself."""
    control.close()
    try:
        process.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the program follows by its death signal
        process.wait()


class _Exchange:
    """Writes stdin, reads the outputs up to their limits, waits for the report."""

    def __init__(
        self, process: subprocess.Popen, control: socket.socket, stdin: bytes, limits: SandboxConfig
    ) -> None:
        self.process, self.control, self.stdin, self.limits = process, control, memoryview(stdin), limits
        self.taken = {process.stdout: bytearray(), process.stderr: bytearray()}
        self.report: bytes | None = None
        self.overflow = False

    def run(self, request: dict) -> Outcome:
        encoded = json.dumps(request).encode()
        deadline = time.monotonic() + self.limits.seconds + _GRACE_S
        with selectors.DefaultSelector() as self.selector:
            for pipe in self.taken:
                os.set_blocking(pipe.fileno(), False)
                self.selector.register(pipe, selectors.EVENT_READ)
            os.set_blocking(self.process.stdin.fileno(), False)
            self.selector.register(self.process.stdin, selectors.EVENT_WRITE)
            self.selector.register(self.control, selectors.EVENT_READ)
            try:
                self.control.sendall(len(encoded).to_bytes(8, "big") + encoded)
            except BrokenPipeError:
                pass  # the jail did not start; its stderr is reported below
            while self.report is None or self._pipes_open():
                waited = max(0.0, deadline - time.monotonic()) if self.report is None else 0.0
                ready = self.selector.select(waited)
                if not ready:
                    break  # no report in time, or another process keeps a pipe open and writes nothing
                for key, _ in ready:
                    if key.fileobj in self.selector.get_map():  # an overflow of stdout ends reading of both pipes
                        self._step(key.fileobj)
        return self._outcome()

    def _pipes_open(self) -> bool:
        return any(pipe in self.selector.get_map() for pipe in self.taken)

    def _step(self, pipe) -> None:
        if pipe is self.control:
            self.report = self.control.recv(1 << 16)
            self.selector.unregister(pipe)
        elif pipe is self.process.stdin:
            self._feed(pipe)
        else:
            part = os.read(pipe.fileno(), 1 << 16)
            if not part:
                self.selector.unregister(pipe)
            self._take(pipe, part)

    def _feed(self, pipe) -> None:
        try:
            self.stdin = self.stdin[os.write(pipe.fileno(), self.stdin[: 1 << 16]) :]
        except BrokenPipeError:
            self.stdin = self.stdin[:0]  # the program closed its stdin
        if not self.stdin:
            self.selector.unregister(pipe)
            pipe.close()

    def _take(self, pipe, part: bytes) -> None:
        """Keep what fits; further stdout ends the program, further stderr is discarded."""
        most = self.limits.output_kb << 10 if pipe is self.process.stdout else _KEPT_OF_STDERR
        room = most - len(self.taken[pipe])
        self.taken[pipe] += part[:room]
        if len(part) > room and pipe is self.process.stdout and not self.overflow:
            self.overflow = True
            self.control.shutdown(socket.SHUT_WR)
            for open_pipe in [p for p in self.taken if p in self.selector.get_map()]:
                self.selector.unregister(open_pipe)

    def _outcome(self) -> Outcome:
        stdout, stderr = (bytes(kept) for kept in self.taken.values())
        refused = {"refused": f"no report; {stderr.decode(errors='replace')}"}
        report = json.loads(self.report) if self.report else refused
        if "refused" in report:
            raise SandboxUnavailable(
                f"this machine cannot confine programs ({report['refused'].strip()}). Allow user namespaces and "
                "Landlock here, name a remote service in reward_model.sandbox_fusion.url, or set "
                "reward_model.sandbox.unconfined=true to run model-written code with resource limits alone."
            )
        stopped = "output" if self.overflow else "time" if report["timeout"] else None
        return Outcome(stdout, stderr, report["exit"], stopped, report["seconds"])
