"""Runs one Python program in the sandbox."""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from verl.config.sandbox import SandboxConfig
from verl.reward.pool import FatalGradingError
from verl.utils.children import Program

_JAIL = str(Path(__file__).with_name("jail.py"))
_PYTHON = os.path.realpath(sys.executable)
# What the program can read: the interpreter, its library and the system's; nothing of the user, no /etc, no /proc.
_VISIBLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", f"{sys.base_prefix}/lib", _PYTHON)
_GRACE_S = 15.0  # for the jail to start and to report, beyond the program's own time
_KEPT_OF_STDERR = 16 << 10  # bytes
_STDOUT, _STDERR = 1, 2  # descriptors


class SandboxUnavailable(FatalGradingError):
    """This machine does not support the confinement; the message says which part, and what to do."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended. `stopped`: why it was killed, "time" or "output", else None. Exit codes below 0: signals."""

    stdout: bytes
    stderr: bytes
    exit_code: int
    stopped: str | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0. Says nothing about the output: a program chooses its code."""
        return self.stopped is None and self.exit_code == 0


@functools.cache
def _package_folders() -> list[str]:
    """The folders in _VISIBLE with packages beyond the standard library. A library that is a link has none."""
    folders = [f for path in _VISIBLE if not os.path.islink(path) for f in Path(path).glob("python*/*-packages")]
    return [str(folder) for folder in folders if folder.is_dir() and not folder.is_symlink()]


def run_python(program: str, stdin: bytes = b"", limits: SandboxConfig | None = None) -> Outcome:
    """Run the source of a Python program on `stdin`; it can import the standard library only.

    It is killed after `limits.seconds`, or once it has written more than `limits.output_kb` to stdout; a program above
    `limits.disk_mb` is not run and has exit code 1. Raises SandboxUnavailable when the kernel refuses a layer of the
    confinement and `limits.unconfined` is false.
    """
    limits = limits or SandboxConfig()
    size, room = len(program.encode("utf-8", "surrogatepass")), limits.disk_mb << 20
    if size > room:  # the jail could not write its file, and would report that as a fault of this machine
        return Outcome(b"", f"the program has {size} bytes, sandbox.disk_mb allows {room}".encode(), 1, None, 0.0)
    folder = tempfile.mkdtemp(prefix="verl-sandbox-") if limits.unconfined else None
    request = {name: limits[name] for name in limits if name != "_target_"}
    request |= {"program": program, "python": _PYTHON, "folder": folder}
    request |= {"visible": _VISIBLE, "masked": _package_folders()}
    outputs, overflow = {_STDOUT: bytearray(), _STDERR: bytearray()}, False

    def take(descriptor: int, part: bytes) -> bool:
        nonlocal overflow
        most = limits.output_kb << 10 if descriptor == _STDOUT else _KEPT_OF_STDERR
        kept = part[: most - len(outputs[descriptor])]
        outputs[descriptor] += kept
        overflow = overflow or (descriptor == _STDOUT and len(kept) < len(part))  # of stderr the rest is discarded
        return not overflow

    jail = Program(
        [_PYTHON, "-I", "-S", _JAIL], stdin=stdin, env={}, cwd="/", stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        with contextlib.suppress(OSError):  # the jail did not start; its stderr is reported below
            jail.connection.send_bytes(json.dumps(request).encode())
        report = jail.outputs(limits.seconds + _GRACE_S, take)
    finally:
        jail.end(_GRACE_S)  # a jail that hangs is killed, and the program follows by its death signal
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    ended = json.loads(report or json.dumps({"refused": f"no report; {outputs[_STDERR].decode(errors='replace')}"}))
    if "refused" in ended:
        raise SandboxUnavailable(
            f"this machine cannot confine programs ({ended['refused'].strip()}). Allow user namespaces and "
            "Landlock here, name a remote service in reward_model.sandbox_fusion.url, or set "
            "reward_model.sandbox.unconfined=true to run model-written code with resource limits alone. A code tool "
            "reads neither key: set unconfined: true in its own config."
        )
    stopped = "output" if overflow else "time" if ended["timeout"] else None
    return Outcome(bytes(outputs[_STDOUT]), bytes(outputs[_STDERR]), ended["exit"], stopped, ended["seconds"])
