"""Grades many items in worker processes that are killed when one item takes too long."""

from __future__ import annotations

import asyncio
import functools
import inspect
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

from verl.utils.import_utils import load_extern_object
from verl.utils.supervisor import guard, kill_when_closed
from verl.utils.threads import PROCESS_STARTS, run_if_coroutine
from verl.utils.user_code import full_traceback, user_frame

# The fork server imports these once, so that a killed worker is replaced in milliseconds; the slow ones only for the
# functions that need them.
_PRELOAD = ["verl.reward.pool"]
_PRELOAD_FOR = {"verl.reward.rules": ["verl.reward.rules", "math_verify"]}
_MEMORY_BYTES = 4 << 30  # that one worker may allocate beyond what it starts with


class ExternFunction:
    """A function given by file or module and name, with bound keyword arguments (which win); it can be pickled.

    `inspect.signature` sees the signature of the function itself.
    """

    def __init__(self, path: str, name: str, bound: dict[str, Any] | None = None) -> None:
        self.source = (path, name, bound or {})
        self.function = load_extern_object(path, name)
        functools.update_wrapper(self, self.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **{**kwargs, **self.source[2]})

    def __reduce__(self) -> tuple:
        return ExternFunction, self.source

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)


@dataclass(frozen=True)
class Failure:
    """Stands in for a result: kind 'error' or 'timeout', a description, whether it concerns every item."""

    kind: str
    text: str
    fatal: bool = False
    cause: Exception | None = None

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The failure for a raised exception."""
        frame = user_frame(full_traceback(error))
        text = f"raised {type(error).__name__}: {error}{f' (at {frame})' if frame else ''}"
        return cls("error", text, isinstance(error, FatalGradingError), error)


class FatalGradingError(RuntimeError):
    """Raised when no item can be graded, whatever its content: dropping single items would hide the cause."""


class Slots(threading.Semaphore):
    """A semaphore that can be pickled: each process has `number` slots of its own, which a killed one cannot keep."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __reduce__(self) -> tuple:
        return Slots, (self.number,)


class BatchedCalls:
    """Calls a function for several items at once; coroutines are awaited, each for at most `seconds` (None: no limit).

    An item whose call raises has a Failure as its result.
    """

    def __init__(self, function: Any, seconds: float | None = None) -> None:
        self.function, self.seconds = function, seconds

    async def __call__(self, items: list[dict[str, Any]]) -> list[Any]:
        return await asyncio.gather(*map(self._one, items))

    async def _one(self, item: dict[str, Any]) -> Any:
        try:
            result = self.function(**item)
            return await asyncio.wait_for(result, self.seconds) if inspect.isawaitable(result) else result
        except Exception as error:
            if isinstance(error, TimeoutError) and self.seconds is not None:
                return Failure("timeout", f"took longer than {self.seconds:g} s")
            return Failure.of(error)


def call_for_batch(function: Any, /, **arguments: Any) -> list[Any]:
    """The result of one call for a batch, as a list; it has one score per row."""
    return list(run_if_coroutine(function(**arguments)))


def call_by_position(function: Any, /, arguments: Sequence[Any]) -> Any:
    """The result of one call, whatever the names of its parameters."""
    return function(*arguments)


class GradingPool:
    """`workers` processes that call `function` on one item each, started on first use and replaced when killed.

    The function runs in the main thread of its process; coroutines are awaited there.
    """

    def __init__(self, function: Any, workers: int, seconds: float) -> None:
        self.function, self.workers, self.seconds = function, workers, seconds
        self._idle: list[_Worker] = []
        self.restarts = 0

    def __reduce__(self) -> tuple:
        return GradingPool, (self.function, self.workers, self.seconds)

    def map(self, items: Sequence[dict[str, Any]]) -> list[Any]:
        """`function(**item)` of each item, in order; a Failure when it raised or took longer than `seconds`."""
        results: list[Any] = [None] * len(items)
        waiting = list(range(len(items)))[::-1]
        busy: dict[_Worker, int] = {}
        while waiting or busy:
            while waiting and len(busy) < self.workers:
                worker = self._idle.pop() if self._idle else _Worker(self.function)
                number = waiting.pop()
                if failure := worker.send(items[number], self.seconds):
                    results[number] = failure
                    self._idle.append(worker)
                else:
                    busy[worker] = number
            for worker in _ready(busy):
                number = busy.pop(worker)
                results[number] = worker.take()
                if worker.alive:
                    self._idle.append(worker)
                else:
                    self.restarts += 1
        return results

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._idle:
            worker.kill()
        self._idle = []


def start_worker(target: Any, *arguments: Any, preload: Sequence[str] = ()) -> tuple[Any, Connection, Connection]:
    """Start `target(connection, life, *arguments)` in a process of the fork server.

    Returns the process, this end of the connection, and a pipe end to close after the process has ended. `target`
    begins with `begin_worker(life)`, which ends the process with this one.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *preload])
    with PROCESS_STARTS:
        connection, other = context.Pipe()
        life, alive = context.Pipe(duplex=False)  # open as long as this process lives
        process = context.Process(target=target, args=(other, life, *arguments), daemon=True)
        # Workers import nothing of the script that was started, which may have no `if __name__ == "__main__"`.
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main
        other.close()
        life.close()
    return process, connection, alive


def begin_worker(life: Connection, connection: Connection | None = None) -> None:
    """Set up a worker process: it ends with its owner, ignores Ctrl-C, and has a limit on its memory.

    With its `connection` to the owner it leads a process group, which is killed when the worker is gone.
    """
    if connection is not None:
        os.setsid()
        guard(os.getpid(), connection.fileno(), life.fileno())
    kill_when_closed(life.fileno())  # by the owner's end
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


class _Worker:
    def __init__(self, function: Any) -> None:
        preload = _PRELOAD_FOR.get(function.__module__, [])
        self.process, self.connection, self._alive = start_worker(_work, function, preload=preload)
        self.alive = True
        try:
            self.connection.recv()  # the function is loaded: imports do not count for the time of an item
        except EOFError as error:
            self.kill()
            raise FatalGradingError(f"a grading process could not load {function!r}; its error is above.") from error

    def send(self, item: dict[str, Any], seconds: float) -> Failure | None:
        self.seconds, self.deadline = seconds, time.monotonic() + seconds
        try:
            # Not `send`: multiprocessing would share a tensor's memory, which a killed process may keep.
            self.connection.send_bytes(pickle.dumps(item))
        except OSError:
            pass  # it died while idle; `take` reports it
        except Exception as error:  # the item cannot be pickled
            return Failure.of(error)
        return None

    def take(self) -> Any:
        """The result, or a Failure; after a timeout or a dead process the worker is not `alive`."""
        if not self.connection.poll():
            self.kill()
            return Failure("timeout", f"took longer than {self.seconds:g} s and was killed")
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.kill()
            return Failure("error", f"ended its process with exit code {self.process.exitcode}")

    def kill(self) -> None:
        self.alive = False
        self.process.kill()
        self.process.join()
        self.connection.close()
        self._alive.close()


def _ready(busy: dict[_Worker, int]) -> list[_Worker]:
    """Waits until a busy worker answers, dies or exceeds its time; returns those."""
    if not busy:
        return []
    left = min(worker.deadline for worker in busy) - time.monotonic()
    readable = wait([worker.connection for worker in busy], timeout=max(0.0, left))
    return [w for w in busy if w.connection in readable or w.deadline <= time.monotonic()]


def _work(connection: Connection, life: Connection, function: Any) -> None:
    begin_worker(life)
    connection.send("ready")
    while True:
        try:
            item = connection.recv()
        except (EOFError, OSError):
            return  # the owner is gone
        try:
            connection.send(run_if_coroutine(function(**item)))
        except Exception as error:
            connection.send(replace(Failure.of(error), cause=None))  # the exception itself may not be picklable
