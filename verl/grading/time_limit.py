"""Limits the time of a call."""

from __future__ import annotations

import functools
import multiprocessing
import signal
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pebble

from verl.utils.stop_signals import stop_with_parent


class _Alarm(BaseException):
    """The time is up. No `except Exception` of the function that is interrupted may swallow it."""


def timeout_limit(seconds: float, use_signals: bool = False) -> Callable:
    """Decorator: TimeoutError when the call takes longer than `seconds`.

    use_signals=False runs the call in a forked process that is killed at the limit: this also stops C code, but side
    effects stay in that process, and pebble.ProcessExpired is raised when it ends early. use_signals=True interrupts
    Python code in place and needs the main thread.
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
        raise _Alarm

    previous = signal.signal(signal.SIGALRM, on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        return func(*args, **kwargs)
    except _Alarm:
        raise TimeoutError(f"{func.__qualname__} took longer than {seconds} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def prepare_child() -> None:
    """In a process that pebble forked: end at once on SIGTERM or when the caller is gone, also in C code."""
    stop_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler would wait for Python code to run


def _run_in_child(func: Callable, seconds: float, args: tuple, kwargs: dict) -> Any:
    @pebble.concurrent.process(timeout=seconds, context=multiprocessing.get_context("fork"))
    def call() -> Any:  # the arguments are inherited by the fork, so they need not be picklable
        prepare_child()
        result = func(*args, **kwargs)
        ForkingPickler.dumps(result)  # raises here what would end pebble's process without a message
        return result

    try:
        return call().result()
    except TimeoutError as error:
        raise TimeoutError(f"{func.__qualname__} took longer than {seconds} s") from error
    except pebble.ProcessExpired as error:
        code = error.exitcode
        raise pebble.ProcessExpired(f"{func.__qualname__}: its process ended with exit code {code}", code) from error
