"""A limit of time for calls, in place or in a process that can be killed."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # Linux


class ChildDied(RuntimeError):
    """A process ended without an answer; the text has its exit code."""


class Child:
    """A forked process that calls `function`, over and over, until a call takes too long.

    What it is given and gives back is pickled; `function` itself is not. Daemonic processes may have one too. It dies
    with the thread that made it. For one thread at a time.
    """

    def __init__(self, function: Callable) -> None:
        self.name, caller = function.__qualname__, os.getpid()
        self._connection, theirs = multiprocessing.Pipe()
        self._pid: int | None = os.fork()  # multiprocessing refuses a child to a daemonic process, as graders are
        if self._pid == 0:
            self._connection.close()
            _serve(function, theirs, caller)
        theirs.close()

    def call(self, seconds: float, *args: Any, **kwargs: Any) -> Any:
        """The result of a call, or what it raised. TimeoutError and ChildDied: it is `gone`, make another."""
        try:
            self._connection.send((args, kwargs))
            answer = self._connection.recv() if self._connection.poll(seconds) else None
        except (EOFError, ConnectionError) as error:
            raise ChildDied(f"{self.name}: its process ended with exit code {self.end()}") from error
        except BaseException:  # an answer that nobody took would pass for that of the next call
            self.end()
            raise
        if answer is None:
            self.end()
            raise TimeoutError(f"{self.name} took longer than {seconds} s")
        returned, value = answer
        if not returned:
            raise value
        return value

    @property
    def gone(self) -> bool:
        """Whether it was ended."""
        return self._pid is None

    def end(self) -> int | None:
        """Kill it: its exit code; None a second time, and where this process leaves its children to the kernel."""
        self._connection.close()
        pid, self._pid = self._pid, None
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return None


def _serve(function: Callable, connection: Connection, caller: int) -> None:
    """The child's life: it never comes back."""
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a call without end must not outlive its caller
        while os.getppid() == caller:
            args, kwargs = connection.recv()
            try:
                connection.send((True, function(*args, **kwargs)))
            except Exception as error:
                connection.send((False, error))
    finally:
        os._exit(0)


def timeout_limit(seconds: float, use_signals: bool = False) -> Callable:
    """Decorator: TimeoutError when the call takes longer than `seconds`.

    use_signals=False runs the call in a forked process that is killed at the limit, so it also stops C code, but the
    call's side effects stay in that process, and ChildDied is raised where it ends early. use_signals=True interrupts
    in place and needs the main thread.
    """
    if seconds <= 0:
        raise ValueError(f"timeout_limit: seconds={seconds} must be positive")
    run = _run_with_alarm if use_signals else _run_in_child

    def decorate(func: Callable) -> Callable:
        @functools.wraps(func)
        def limited(*args, **kwargs):
            return run(func, seconds, args, kwargs)

        return limited

    return decorate


def _run_with_alarm(func: Callable, seconds: float, args: tuple, kwargs: dict) -> Any:
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(f"{func.__qualname__}: timeout_limit(use_signals=True) works in the main thread only")

    def on_alarm(signum, frame):
        raise TimeoutError(f"{func.__qualname__} took longer than {seconds} s")

    previous = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return func(*args, **kwargs)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _run_in_child(func: Callable, seconds: float, args: tuple, kwargs: dict) -> Any:
    @functools.wraps(func)
    def call() -> Any:  # the arguments travel by the fork, whatever they are
        return func(*args, **kwargs)

    child = Child(call)
    try:
        return child.call(seconds)
    finally:
        child.end()
