"""Renders chat templates in a subprocess with limits on memory, time and the length of the result.

The subprocess runs this file as a script. To start quickly, it imports neither transformers nor other modules of this
package. `multiprocessing` cannot be used: data loader and grading workers render templates too, are daemonic, and
cannot fork safely.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30  # limit for a rendering, in addition to the memory of the idle subprocess
TEXT_LENGTH = 1 << 26  # limit of the rendered text, in characters
_START_S = 60.0  # limit for the start of the subprocess, which takes about a tenth of a second
_WALL = 20  # times the limit of processor time, which the subprocess enforces: it waits on a busy machine
_TEXT, _ERROR, _MEMORY, _LONG = b"text", b"error", b"memory", b"long"


class LimitExceeded(RuntimeError):
    """A rendering exceeded the limit that the message states."""


class RenderError(RuntimeError):
    """A rendering raised an exception, whose type and text are in the message."""


class TemplateProcess:
    """A subprocess shared by all threads, started on first use and restarted after it has ended.

    It ends when this process ends, because its end of the connection is then closed.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # a forked process starts a subprocess of its own

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def render(self, seconds: float, template: str, variables: dict[str, Any]) -> str:
        """The text of a template with these variables.

        Raises LimitExceeded after `seconds` of processor time or at another limit, and RenderError if the template
        raises an exception.
        """
        request = (seconds, MEMORY_BYTES, TEXT_LENGTH, template, variables)
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self._end()
                    self._start()
                self._connection.send(request)
                if not self._connection.poll(seconds * _WALL):
                    raise TimeoutError
                answer = self._connection.recv_bytes()
            except (EOFError, OSError):  # includes TimeoutError; the subprocess has ended or hangs
                code = self._end()
                if code in (-signal.SIGPROF, -signal.SIGKILL):
                    raise LimitExceeded(f"did not end within {seconds:g} s of processor time and was stopped") from None
                raise LimitExceeded(f"ended its process with exit code {code}") from None
            except BaseException:  # otherwise the next request would receive the response to this one
                self._end()
                raise
        kind, _, text = answer.partition(b" ")
        if kind == _MEMORY:
            raise LimitExceeded(f"needed more than {MEMORY_BYTES >> 20} MiB of memory and was stopped")
        if kind == _LONG:
            raise LimitExceeded(f"made a text of more than {TEXT_LENGTH} characters, which was not taken")
        if kind == _ERROR:
            raise RenderError(text.decode("utf-8", "surrogatepass"))
        return text.decode("utf-8", "surrogatepass")

    def _start(self) -> None:
        self._connection, child_connection = Pipe()
        with child_connection:
            # -P: modules in this folder must not shadow those of the standard library.
            command = [sys.executable, "-P", __file__, str(child_connection.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[child_connection.fileno()]
            )
        if not self._connection.poll(_START_S):
            raise TimeoutError
        self._connection.recv_bytes()

    def _end(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            if process.poll() is None:
                process.kill()
        self._connection.close()
        return process.wait()


def main(descriptor: int) -> None:
    """Run the subprocess: serve requests until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # kills the process, also within C code
    connection = Connection(descriptor)
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError, OSError):
        while True:
            seconds, memory, length, template, variables = connection.recv()
            previous_limits = _limit_memory(memory)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                text = _compiled(template).render(variables)
                answer = _LONG if len(text) > length else _TEXT + b" " + text.encode("utf-8", "surrogatepass")
            except MemoryError:
                answer = _MEMORY
            except Exception as error:  # a template can raise anything
                message = f"{type(error).__name__}: {str(error)[:1000]}"
                answer = _ERROR + b" " + message.encode("utf-8", "surrogatepass")
            signal.setitimer(signal.ITIMER_PROF, 0)
            text = None  # frees its memory before the next request
            resource.setrlimit(resource.RLIMIT_AS, previous_limits)
            connection.send_bytes(answer)


class _Generation(Extension):
    """The block `generation`, which marks what the model writes: its content is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    """The template in an environment with the settings, filters and functions that transformers provides."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": lambda f: datetime.now().strftime(f)}
    return environment.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _limit_memory(additional: int) -> tuple[int, int]:
    """Limit the address space to its current size plus `additional` bytes; returns the previous (soft, hard) limits."""
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + additional
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    return soft, hard


if __name__ == "__main__":
    main(int(sys.argv[1]))
