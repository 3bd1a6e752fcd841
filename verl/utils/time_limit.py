"""Limits the time of a call, in place or in a process that can be killed."""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import psutil

from verl.utils.supervisor import end_with_parent


class ChildDied(RuntimeError):
    """A process ended without a result; the message has its exit code."""


class _Alarm(BaseException):
    """The time is up. No `except Exception` of the interrupted function may swallow it."""


class ProcessorSeconds(float):
    """A limit of the processor time of a call, which a busy machine does not use up: as seconds of the functions here.

    A call that waits without computing ends after WALL times that, by the clock.
    """

    WALL = 20


def _remaining(limit: float, used: float, elapsed: float) -> float:
    """Seconds until a call is to be looked at again; 0 if it has reached its limit."""
    if not isinstance(limit, ProcessorSeconds):
        return max(0.0, limit - elapsed)
    return max(0.0, min(limit - used, limit * limit.WALL - elapsed))


class Child:
    """A forked process that calls `function` repeatedly, until a call takes too long.

    Arguments and results are pickled; `function` is not. Also for daemonic processes, and for one thread at a time. It
    dies with the thread that created it.
    """

    def __init__(self, function: Callable) -> None:
        self.name, caller = function.__qualname__, os.getpid()
        self._connection, child_connection = multiprocessing.Pipe()
        self._pid: int | None = os.fork()  # multiprocessing refuses a child to daemonic grading workers
        if self._pid == 0:
            self._connection.close()
            _serve(function, child_connection, caller)
        child_connection.close()

    def call(self, seconds: float, *args: Any, **kwargs: Any) -> Any:
        """The result of a call, or its exception. After TimeoutError or ChildDied it is `gone`: create another.

        `seconds` by the clock, or ProcessorSeconds of the process.
        """
        try:
            before, began = self._used(), time.monotonic()
            self._connection.send((args, kwargs))
            wait, answer = float(seconds), None
            while wait > 0 and answer is None:
                answer = self._connection.recv() if self._connection.poll(wait) else None
                wait = _remaining(seconds, self._used() - before, time.monotonic() - began)
        except (EOFError, ConnectionError) as error:
            raise ChildDied(f"{self.name}: its process ended with exit code {self.end()}") from error
        except BaseException:  # a result left in the pipe would be taken for that of the next call
            self.end()
            raise
        if answer is None:
            self.end()
            raise TimeoutError(f"{self.name} took longer than {seconds} s")
        returned, value = answer
        if not returned:
            raise value
        return value

    def _used(self) -> float:
        """Seconds of processor time that the process has had; 0 if it has ended."""
        try:
            times = psutil.Process(self._pid).cpu_times()
        except psutil.Error:
            return 0.0
        return times.user + times.system

    @property
    def gone(self) -> bool:
        """Whether it was ended."""
        return self._pid is None

    def end(self) -> int | None:
        """Kill it and return its exit code; None a second time, or if this process does not wait for its children."""
        self._connection.close()
        pid, self._pid = self._pid, None
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return None


def _serve(function: Callable, connection: Connection, caller: int) -> None:
    """Run the child's loop; does not return."""
    try:
        end_with_parent(signal.SIGKILL, caller)  # an endless call must not outlive its caller
        while True:
            args, kwargs = connection.recv()
            try:
                connection.send((True, function(*args, **kwargs)))
            except Exception as error:
                connection.send((False, error))
    finally:
        os._exit(0)


def timeout_limit(seconds: float, use_signals: bool = False) -> Callable:
    """Decorator: TimeoutError when the call takes longer than `seconds`.

    use_signals=False runs the call in a forked process that is killed at the limit: this also stops C code, but side
    effects stay in that process, and ChildDied is raised when it ends early. use_signals=True interrupts Python code
    in place and needs the main thread.
    """
    if seconds <= 0:
        raise ValueError(f"timeout_limit: seconds={seconds} must be positive")

    def decorate(func: Callable) -> Callable:
        @functools.wraps(func)
        def limited(*args, **kwargs):
            if use_signals:
                return call_with_alarm(func, seconds, *args, **kwargs)

            @functools.wraps(func)
            def call() -> Any:  # the fork inherits the arguments, which need not be picklable
                return func(*args, **kwargs)

            child = Child(call)
            try:
                return child.call(seconds)
            finally:
                child.end()

        return limited

    return decorate


def call_with_alarm(func: Callable, seconds: float, *args: Any, **kwargs: Any) -> Any:
    """Call `func` in the main thread; its Python code is interrupted by TimeoutError after `seconds`.

    `seconds` by the clock, or ProcessorSeconds of the thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(f"{func.__qualname__}: timeout_limit(use_signals=True) works in the main thread only")

    used, began = time.thread_time(), time.monotonic()

    def on_alarm(signum, frame):
        wait = _remaining(seconds, time.thread_time() - used, time.monotonic() - began)
        if wait < 1e-3:
            raise _Alarm
        signal.setitimer(signal.ITIMER_REAL, wait)

    previous = signal.signal(signal.SIGALRM, on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        return func(*args, **kwargs)
    except _Alarm:
        raise TimeoutError(f"{func.__qualname__} took longer than {seconds} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def call_interruptibly(func: Callable, seconds: float, *args: Any, **kwargs: Any) -> Any:
    """Call `func` in this thread, whichever it is; its Python code is interrupted by TimeoutError after `seconds`.

    For threads that signals do not reach in processes that cannot fork safely (with a process group, say). `seconds` by
    the clock, or ProcessorSeconds of the thread.
    """
    thread, lock, ended = threading.get_ident(), threading.Lock(), threading.Event()
    clock, began = time.pthread_getcpuclockid(thread), time.monotonic()
    used = time.clock_gettime(clock)

    def interrupt() -> None:
        wait = float(seconds)
        while wait >= 1e-3:
            if ended.wait(wait):
                return
            wait = _remaining(seconds, time.clock_gettime(clock) - used, time.monotonic() - began)
        with lock:
            if not ended.is_set():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Alarm))

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        try:
            return func(*args, **kwargs)
        finally:
            with lock:
                ended.set()
    except _Alarm:
        raise TimeoutError(f"{func.__qualname__} took longer than {seconds} s") from None
