"""Runs a program that a user wrote, with limits on its time, memory, processes and output."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from verl.agents.gateway import program_guard
from verl.utils.threads import PROCESS_STARTS

GUARD = Path(program_guard.__file__)
OUTPUT_BYTES = 64 << 20  # of standard output and error together; a program that writes more is ended
KEPT_BYTES = 32 << 10  # the end of each that is kept
GRACE_S = 15.0  # for the guard to start, to end all processes and to report
#: The rendezvous of the trainer's ranks must not reach the program.
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Limits:
    """Limits of a program with all its processes: seconds, bytes of memory, number of processes."""

    seconds: float
    memory_bytes: int
    processes: int


@dataclass(frozen=True)
class Ending:
    """How a program ended; `stopped` is None, or why it was ended: time, memory, processes, output, owner,
    or guard if the process that supervises it was killed."""

    exit_code: int
    stopped: str | None
    stdout: str
    stderr: str
    seconds: float


def search_path() -> str:
    """PATH of programs: `python` is this interpreter."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def missing_file(command: str) -> str | None:
    """The program of a command line, or an argument that ends with .py, if the file does not exist."""
    program, *arguments = shlex.split(command)
    if shutil.which(program, path=search_path()) is None:
        return program
    return next((word for word in arguments if word.endswith(".py") and not Path(word).is_file()), None)


class Program:
    """A program that has not ended; `end` may be called from any thread."""

    def __init__(self, command: list[str], environment: dict[str, str], limits: Limits) -> None:
        self.command, self.environment, self.limits = command, environment, limits
        self._owner: socket.socket | None = None  # the guard ends all processes when it is closed
        self._reason: str | None = None  # why this object ended it

    def end(self, reason: str = "owner") -> None:
        """End the program and all of its processes."""
        self._reason = self._reason or reason
        self._close()

    def _close(self) -> None:
        """Let the guard end all processes."""
        if self._owner is not None:
            with contextlib.suppress(OSError):
                self._owner.shutdown(socket.SHUT_WR)

    def run(self, stdin: bytes) -> Ending:
        """Run it to its end; blocks for at most `limits.seconds` and a few more."""
        started = time.monotonic()
        variables = {name: value for name, value in os.environ.items() if name not in RANKS} | self.environment
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            with PROCESS_STARTS:
                self._owner, theirs = socket.socketpair()
                with theirs:
                    process = subprocess.Popen(
                        [sys.executable, "-I", "-S", str(GUARD), str(theirs.fileno()), *self.command], stdin=given,
                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables, start_new_session=True,
                        pass_fds=[theirs.fileno()],
                    )  # fmt: skip
            with self._owner, process:
                if self._reason is not None:  # ended before it started
                    self._close()
                try:
                    report, texts = self._wait(process, started)
                finally:
                    self._close()
                    try:
                        process.wait(timeout=GRACE_S)
                    except subprocess.TimeoutExpired:
                        process.kill()  # its program follows by its death signal
        stopped = report["stopped"] if "exit" in report else self._reason or "guard"
        stderr = texts[1] + report.get("error", "")
        return Ending(report.get("exit", -9), stopped, texts[0], stderr, time.monotonic() - started)

    def _wait(self, process: subprocess.Popen, started: float) -> tuple[dict, list[str]]:
        """(the guard's report or {}, the ends of standard output and error)."""
        limits = {"seconds": self.limits.seconds, "memory_bytes": self.limits.memory_bytes,
                  "processes": self.limits.processes}  # fmt: skip
        with contextlib.suppress(OSError):
            self._owner.sendall(json.dumps(limits).encode() + b"\n")
        kept: dict = {process.stdout: bytearray(), process.stderr: bytearray()}
        written, report, deadline = 0, b"", started + self.limits.seconds + GRACE_S
        with selectors.DefaultSelector() as selector:
            for file in (*kept, self._owner):
                selector.register(file, selectors.EVENT_READ)
            while selector.get_map() and time.monotonic() < deadline:
                for key, _ in selector.select(max(0.0, min(0.5, deadline - time.monotonic()))):
                    try:
                        part = os.read(key.fd, 1 << 16)
                    except ConnectionResetError:  # the guard was killed before it read the limits
                        part = b""
                    if not part:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is self._owner:
                        report += part
                    else:
                        written += len(part)
                        kept[key.fileobj] = (kept[key.fileobj] + part)[-KEPT_BYTES:]
                        if written > OUTPUT_BYTES:
                            self.end("output")
        return json.loads(report or b"{}"), [bytes(text).decode(errors="replace") for text in kept.values()]
