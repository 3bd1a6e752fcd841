"""Renders chat templates in a subprocess with limits on memory, time and the length of the result.

The subprocess runs this file as a script, so the file must not import other modules of the package. `multiprocessing`
cannot be used: data loader and grading workers render templates too, are daemonic, and cannot fork safely.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from types import SimpleNamespace
from typing import Any

MEMORY_BYTES = 1 << 30  # limit for a rendering, in addition to the memory of the idle subprocess
TEXT_LENGTH = 1 << 26  # limit of the rendered text, in characters
_START_S = 300.0  # limit for the start of the subprocess, which imports transformers
_GRACE_S = 5.0  # in addition to the time limit of a request, which the subprocess enforces
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

    def render(self, seconds: float, template: str, tokens: dict[str, str], messages: Any, settings: dict) -> str:
        """`apply_chat_template(messages, **settings)` of a tokenizer with this template and these special tokens.

        Raises LimitExceeded after `seconds` or at another limit, and RenderError if the template raises an exception.
        """
        request = (seconds, MEMORY_BYTES, TEXT_LENGTH, template, tokens, messages, settings)
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self._end()
                    self._start()
                self._connection.send(request)
                if not self._connection.poll(seconds + _GRACE_S):
                    raise TimeoutError
                answer = self._connection.recv_bytes()
            except (EOFError, OSError):  # includes TimeoutError; the subprocess has ended or hangs
                code = self._end()
                if code in (-signal.SIGALRM, -signal.SIGKILL):
                    raise LimitExceeded(f"did not end within {seconds:g} s and was stopped") from None
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
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[child_connection.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
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
    from transformers import PreTrainedTokenizerBase

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # kills the process, also within C code
    connection = Connection(descriptor)
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError, OSError):
        while True:
            seconds, memory, length, template, tokens, messages, settings = connection.recv()
            tokenizer = SimpleNamespace(special_tokens_map=tokens, get_chat_template=lambda *_, text=template: text)
            previous_limits = _limit_memory(memory)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                text = PreTrainedTokenizerBase.apply_chat_template(tokenizer, messages, tokenize=False, **settings)
                answer = _LONG if len(text) > length else _TEXT + b" " + text.encode("utf-8", "surrogatepass")
            except MemoryError:
                answer = _MEMORY
            except Exception as error:  # a template can raise anything
                message = f"{type(error).__name__}: {str(error)[:1000]}"
                answer = _ERROR + b" " + message.encode("utf-8", "surrogatepass")
            signal.setitimer(signal.ITIMER_REAL, 0)
            text = None  # frees its memory before the next request
            resource.setrlimit(resource.RLIMIT_AS, previous_limits)
            connection.send_bytes(answer)


def _limit_memory(additional: int) -> tuple[int, int]:
    """Limit the address space to its current size plus `additional` bytes; returns the previous (soft, hard) limits."""
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + additional
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    return soft, hard


if __name__ == "__main__":
    main(int(sys.argv[1]))
