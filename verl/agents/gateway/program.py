"""Runs a program that a user wrote, with limits on its time, memory, processes and output."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from verl.utils import children

OUTPUT_BYTES = 64 << 20  # of standard output and error together; a program that writes more is ended
KEPT_BYTES = 32 << 10  # the end of each that is kept
GRACE_S = 15.0  # for the supervisor to start, to end all processes and to report


@dataclass(frozen=True)
class Limits:
    """Limits of a program with all its processes: seconds, bytes of memory, number of processes."""

    seconds: float
    memory_bytes: int
    processes: int


@dataclass(frozen=True)
class Ending:
    """How a program ended; stdout and stderr are the last KEPT_BYTES of each.

    `stopped` is None, or why it was ended: time, memory, processes, output, owner (by `Program.end`), or supervisor if
    the process that supervises it was killed.
    """

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
        self._child: children.Program | None = None
        self._reason: str | None = None  # why this object ended it

    def end(self) -> None:
        """End the program and all of its processes."""
        self._reason = self._reason or "owner"
        if self._child is not None:  # else `run` sees the reason, once it has started it
            self._child.stop()

    def run(self, stdin: bytes) -> Ending:
        """Run it to its end; blocks for at most `limits.seconds` and a few more."""
        if self._reason is not None:  # ended before it started
            return Ending(-9, self._reason, "", "", 0.0)
        started, written = time.monotonic(), 0
        kept = {1: b"", 2: b""}  # by file descriptor

        def take(number: int, part: bytes) -> bool:
            nonlocal written
            written += len(part)
            kept[number] = (kept[number] + part)[-KEPT_BYTES:]
            if written > OUTPUT_BYTES:
                self._reason = self._reason or "output"
            return written <= OUTPUT_BYTES

        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._child = child = children.supervised(
            self.command, self.environment, asdict(self.limits), stdin=stdin, **pipes
        )
        try:
            if self._reason is not None:  # ended meanwhile
                child.stop()
            report = json.loads(child.outputs(self.limits.seconds + GRACE_S, take) or b"null")
        finally:
            child.end(GRACE_S)
        if report is None:
            report = {"exit": -9, "stopped": self._reason or "supervisor"}
        elif report["stopped"] == "owner":
            report["stopped"] = self._reason
        stdout, stderr = (kept[number].decode(errors="replace") for number in (1, 2))
        return Ending(report["exit"], report["stopped"], stdout, stderr, time.monotonic() - started)
