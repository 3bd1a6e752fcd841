"""Limits the time of a call, in place or in a process that can be killed."""

import ctypes
import functools
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from verl.utils.children import ForkedChild, ProcessorSeconds


class _Alarm(BaseException):
    """The time is up. No `except Exception` of the interrupted function may swallow it."""


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
                if threading.current_thread() is not threading.main_thread():
                    name = f"{func.__qualname__}: timeout_limit(use_signals=True)"
                    raise ValueError(f"{name} works in the main thread only; set use_signals=False elsewhere")
                return call_interruptibly(func, seconds, *args, **kwargs)

            @functools.wraps(func)
            def call() -> Any:  # the fork inherits the arguments, which need not be picklable
                return func(*args, **kwargs)

            child = ForkedChild(call)
            try:
                return child.call(seconds)
            finally:
                child.end()

        return limited

    return decorate


def call_interruptibly(func: Callable, seconds: float, *args: Any, **kwargs: Any) -> Any:
    """Call `func` in this thread, whichever it is; its Python code is interrupted by TimeoutError after `seconds`.

    For processes that cannot fork safely (with a process group, say). In the main thread it is interrupted by SIGALRM,
    which also ends a call that waits; no signal reaches other threads. `seconds` by the clock, or ProcessorSeconds of
    the thread.
    """
    thread, lock, ended = threading.get_ident(), threading.Lock(), threading.Event()
    in_main = threading.current_thread() is threading.main_thread()
    clock, began = time.pthread_getcpuclockid(thread), time.monotonic()
    used = time.clock_gettime(clock)

    def watch() -> None:
        wait = float(seconds)
        while wait >= 1e-3:
            if ended.wait(wait):
                return
            elapsed = time.monotonic() - began
            if isinstance(seconds, ProcessorSeconds):
                wait = min(seconds + used - time.clock_gettime(clock), seconds * seconds.WALL - elapsed)
            else:
                wait = seconds - elapsed
        with lock:
            if ended.is_set():
                return
            if in_main:
                signal.pthread_kill(thread, signal.SIGALRM)
            else:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Alarm))

    def on_alarm(number: int, frame: Any) -> None:
        raise _Alarm

    previous = signal.signal(signal.SIGALRM, on_alarm) if in_main else None
    threading.Thread(target=watch, daemon=True).start()
    try:
        try:
            return func(*args, **kwargs)
        finally:
            with lock:
                ended.set()
    except _Alarm:
        raise TimeoutError(f"{func.__qualname__} took longer than {seconds} s") from None
    finally:
        if in_main:
            signal.signal(signal.SIGALRM, previous)
