"""Calls a function for many items in worker processes that are killed when one item takes too long."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import inspect
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import TYPE_CHECKING, Any

from verl.utils.import_utils import load_extern_object

if TYPE_CHECKING:
    import torch  # takes seconds to load, and most functions that grade do without

# The server that workers are forked from imports these once, so that a killed worker is replaced in milliseconds;
# the dear ones for the functions that use them.
_PRELOAD = ["verl.grading.pool"]
_PRELOAD_FOR = {"verl.utils.reward_score": ["verl.utils.reward_score", "math_verify"]}
_MEMORY_BYTES = 4 << 30  # that one worker may take beyond what it starts with
_F_SETSIG = 10  # Linux


class ExternFunction:
    """A function by file or module and name, with bound keyword arguments (they win); travels to other processes.

    Looks like the function itself to `inspect.signature`.
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
    """What came instead of a result: kind 'error' or 'timeout', what happened, whether it concerns every item."""

    kind: str
    text: str
    fatal: bool = False
    cause: Exception | None = None

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """That of a raised exception."""
        return cls("error", f"raised {type(error).__name__}: {error}", isinstance(error, FatalGradingError), error)


class FatalGradingError(RuntimeError):
    """Raised where no item can be graded, whatever it holds: dropping items would hide it."""


class Slots(threading.Semaphore):
    """A semaphore that travels: each process has `number` slots of its own, which a killed one cannot keep."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __reduce__(self) -> tuple:
        return Slots, (self.number,)


class Together:
    """A coroutine function for several items at once, each within `seconds`."""

    def __init__(self, function: Any, seconds: float) -> None:
        self.function, self.seconds = function, seconds

    async def __call__(self, items: list[dict[str, Any]]) -> list[Any]:
        return await asyncio.gather(*map(self._one, items))

    async def _one(self, item: dict[str, Any]) -> Any:
        try:
            return await asyncio.wait_for(self.function(**item), self.seconds)
        except TimeoutError:
            return Failure("timeout", f"took longer than {self.seconds:g} s")
        except Exception as error:
            return Failure.of(error)


class WholeBatch:
    """A function that is called once for many rows."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, **arguments: Any) -> list[Any]:
        return list(finished(self.function(**arguments)))


class TravellingTensor:
    """A CPU tensor that arrives in another process as a tensor of its own, not as memory that both share."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach().cpu().contiguous()

    def __reduce__(self) -> tuple:
        import torch

        raw = self.tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor_of, (raw, self.tensor.dtype, tuple(self.tensor.shape))


def _tensor_of(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return (torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)).reshape(shape)


class GradingPool:
    """`workers` processes that call `function` on one item each; started on the first use, replaced when killed.

    The function runs in the main thread of its process. Coroutine functions are awaited there.
    """

    def __init__(self, function: Any, workers: int, seconds: float) -> None:
        self.function, self.workers, self.seconds = function, workers, seconds
        self._idle: list[_Worker] = []
        self.restarts = 0

    def __reduce__(self) -> tuple:
        return GradingPool, (self.function, self.workers, self.seconds)

    def map(self, items: Sequence[dict[str, Any]]) -> list[Any]:
        """`function(**item)` of each item, in order; a Failure where it raised or took longer than `seconds`."""
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
        """End the workers."""
        for worker in self._idle:
            worker.kill()
        self._idle = []


class _Worker:
    def __init__(self, function: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        dear = _PRELOAD_FOR[function.__module__] if function.__module__ in _PRELOAD_FOR else []
        context.set_forkserver_preload([*_PRELOAD, *dear])
        self.connection, other = context.Pipe()
        life, self._alive = context.Pipe(duplex=False)  # open as long as this process lives
        self.process = context.Process(target=_work, args=(other, life, function), daemon=True)
        with _without_main():
            self.process.start()
        other.close()
        life.close()
        self.alive = True
        try:
            self.connection.recv()  # the function is loaded: the time of an item does not count imports
        except EOFError as error:
            self.kill()
            raise FatalGradingError(f"a grading process could not load {function!r}; its error is above.") from error

    def send(self, item: dict[str, Any], seconds: float) -> Failure | None:
        self.seconds, self.deadline = seconds, time.monotonic() + seconds
        try:
            self.connection.send(item)
        except OSError:
            pass  # it died while idle; `take` says so
        except Exception as error:  # the item cannot travel
            return Failure.of(error)
        return None

    def take(self) -> Any:
        """The result, or why there is none; the worker is dead after the latter."""
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


@contextmanager
def _without_main() -> Iterator[None]:
    """Workers import no part of the script that was started: it may run at import."""
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _ready(busy: dict[_Worker, int]) -> list[_Worker]:
    """Workers that answered or died, or those whose time is up; waits for the first, where there is one."""
    if not busy:
        return []
    left = min(worker.deadline for worker in busy) - time.monotonic()
    answered = wait([worker.connection for worker in busy], timeout=max(0.0, left))
    return [w for w in busy if w.connection in answered or w.deadline <= time.monotonic()]


def _work(connection: Connection, life: Connection, function: Any) -> None:
    # The kernel kills this process when the owner is gone: a call without end may never run Python code again.
    fcntl.fcntl(life.fileno(), fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life.fileno(), _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life.fileno(), fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    _bound_memory()
    connection.send("ready")
    while True:
        try:
            item = connection.recv()
        except (EOFError, OSError):
            return  # the owner is gone
        try:
            connection.send(finished(function(**item)))
        except Exception as error:
            connection.send(replace(Failure.of(error), cause=None))  # the exception itself may not travel


def finished(result: Any) -> Any:
    """The result of a call; that of a coroutine once it is run."""

    async def run() -> Any:
        return await result

    return asyncio.run(run()) if inspect.isawaitable(result) else result


def _bound_memory() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = size + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
