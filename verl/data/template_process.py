"""Renders chat templates in a process of its own, with limits on memory, time and the length of the result.

Run as a script it is that process, which needs no other file of this package. A child of multiprocessing would not do:
data loaders and grading workers, which render too, may not have any, and cannot fork safely.
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

MEMORY_BYTES = 1 << 30  # beyond what the process starts with
TEXT_LENGTH = 1 << 26
_START_S = 300.0
_GRACE_S = 5.0
_TEXT, _ERROR, _MEMORY, _LONG = b"text", b"error", b"memory", b"long"


class LimitExceeded(RuntimeError):
    """A rendering exceeded a limit, which the message names."""


class RenderError(RuntimeError):
    """A rendering raised an exception: the message has its type and text."""


class TemplateProcess:
    """One process that renders for all threads of this one, started when first needed, and again after it ended.

    It ends with this process.
    """

    def __init__(self) -> None:
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Have a process of one's own, after a fork."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def render(self, seconds: float, template: str, tokens: dict[str, str], messages: Any, settings: dict) -> str:
        """`apply_chat_template(messages, **settings)` of a tokenizer with this template and these special tokens.

        Raises LimitExceeded, and RenderError for what the template raised.
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
            except (EOFError, OSError):  # it ended, or was stopped (TimeoutError)
                code = self._end()
                if code in (-signal.SIGALRM, -signal.SIGKILL):
                    raise LimitExceeded(f"did not end within {seconds:g} s and was stopped") from None
                raise LimitExceeded(f"ended its process with exit code {code}") from None
            except BaseException:  # the answer to this would be taken for that to the next request
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
        self._connection, theirs = Pipe()
        with theirs:
            # -P: modules of this folder must not hide those of the standard library.
            command = [sys.executable, "-P", __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
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
    """Answer requests until the other end is closed."""
    from transformers import PreTrainedTokenizerBase

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it is doing
    connection = Connection(descriptor)
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError, OSError):
        while True:
            seconds, memory, length, template, tokens, messages, settings = connection.recv()
            tokenizer = SimpleNamespace(special_tokens_map=tokens, get_chat_template=lambda *_, text=template: text)
            limited = _memory_limit(memory)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                text = PreTrainedTokenizerBase.apply_chat_template(tokenizer, messages, tokenize=False, **settings)
                answer = _LONG if len(text) > length else _TEXT + b" " + text.encode("utf-8", "surrogatepass")
            except MemoryError:
                answer = _MEMORY
            except Exception as error:  # a template can raise anything
                name, shown = type(error).__name__, str(error)[:1000]
                answer = _ERROR + b" " + f"{name}: {shown}".encode("utf-8", "surrogatepass")
            signal.setitimer(signal.ITIMER_REAL, 0)
            text = None
            resource.setrlimit(resource.RLIMIT_AS, limited)
            connection.send_bytes(answer)


def _memory_limit(more: int) -> tuple[int, int]:
    """Let this process have so many bytes more than it has; returns the limits from before."""
    with open("/proc/self/statm") as file:
        wanted = int(file.read().split()[0]) * resource.getpagesize() + more
    before = resource.getrlimit(resource.RLIMIT_AS)
    hard = before[1]
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    return before


if __name__ == "__main__":
    main(int(sys.argv[1]))
