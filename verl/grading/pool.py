"""Grades many items in worker processes that are killed when one item takes too long."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import inspect
import multiprocessing
import multiprocessing.context
import os
import resource
import signal
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from verl.utils.import_utils import load_extern_object

if TYPE_CHECKING:
    import torch  # takes seconds to import, and most reward functions do without it

# The fork server imports these once, so that a killed worker is replaced in milliseconds; the slow ones only for the
# functions that need them.
_PRELOAD = ["verl.grading.pool"]
_PRELOAD_FOR = {"verl.utils.reward_score": ["verl.utils.reward_score", "math_verify"]}
_MEMORY_BYTES = 4 << 30  # that one worker may allocate beyond what it starts with
_F_SETSIG = 10  # Linux


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
        return cls("error", f"raised {type(error).__name__}: {error}", isinstance(error, FatalGradingError), error)


class FatalGradingError(RuntimeError):
    """Raised when no item can be graded, whatever its content: dropping single items would hide the cause."""


class Slots(threading.Semaphore):
    """A semaphore that can be pickled: each process has `number` slots of its own, which a killed one cannot keep."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __reduce__(self) -> tuple:
        return Slots, (self.number,)


class Together:
    """Awaits a coroutine function for several items at once, each for at most `seconds`."""

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


class FullBatch:
    """Calls a function once for a batch; the result is a list of one score a row."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, **arguments: Any) -> list[Any]:
        return list(finished(self.function(**arguments)))


class PickledTensor:
    """Pickles a CPU tensor by value: multiprocessing would share its memory, which a killed process may keep."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach().cpu().contiguous()

    def __reduce__(self) -> tuple:
        import torch

        return _rebuild, (self.tensor.reshape(-1).view(torch.uint8).numpy(), self.tensor.dtype, self.tensor.shape)


def _rebuild(raw: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of `shape` from its bytes, uint8 [N]."""
    import torch

    return torch.from_numpy(raw).view(dtype).reshape(shape) if raw.size else torch.empty(shape, dtype=dtype)


class GradingPool:
    """`workers` processes that call `function` on one item each, started on first use and replaced when killed.

    The function runs in the main thread of its process; coroutines are awaited there.
    """

    def __init__(self, function: Any, workers: int, seconds: float) -> None:
        self.function, self.workers, self.seconds = function, workers, seconds
        self.restarts = 0
        self._life, self._alive = multiprocessing.Pipe(duplex=False)  # closed when this object or process ends
        self._pool: ProcessPool | None = None

    def __reduce__(self) -> tuple:
        return GradingPool, (self.function, self.workers, self.seconds)

    def map(self, items: Sequence[dict[str, Any]]) -> list[Any]:
        """`function(**item)` of each item, in order; a Failure where it raised or took longer than `seconds`.

        Raises FatalGradingError when the workers end without having started an item.
        """
        results: dict[int, Any] = {}
        for _ in range(2):  # again when idle workers were killed from outside
            missing = [i for i in range(len(items)) if i not in results]
            results.update(self._run(missing, items))
            if len(results) == len(items):
                return [results[i] for i in range(len(items))]
            self.close()
        raise FatalGradingError(f"the grading processes could not load {self.function!r}; the error is logged above.")

    def close(self) -> None:
        """Stop the workers."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _run(self, numbers: list[int], items: Sequence[dict[str, Any]]) -> dict[int, Any]:
        """Results by item number, without those that no worker started."""
        if self._pool is None or not self._pool.active:
            self._pool = self._new_pool()
            weakref.finalize(self, self._pool.stop)  # no worker replaces those that end with the pipe, see _start
        futures = {i: self._pool.schedule(_call, kwargs=items[i], timeout=self.seconds) for i in numbers}
        try:
            while wait(futures.values(), timeout=1.0).not_done and self._pool.active:
                pass
        except BaseException:  # interrupted: the next map must not wait for these items
            self.close()
            raise
        return {i: self._result(future) for i, future in futures.items() if not _is_lost(future)}

    def _result(self, future: ProcessFuture) -> Any:
        try:
            return future.result()
        except TimeoutError:
            self.restarts += 1
            return Failure("timeout", f"took longer than {self.seconds:g} s and was killed")
        except ProcessExpired as error:
            self.restarts += 1
            return Failure("error", f"ended its process with exit code {error.exitcode}")
        except Exception as error:  # the item or its result cannot be pickled
            return Failure.of(error)

    def _new_pool(self) -> ProcessPool:
        context = _Context()
        context.set_forkserver_preload([*_PRELOAD, *_PRELOAD_FOR.get(self.function.__module__, [])])
        return ProcessPool(self.workers, initializer=_start, initargs=(self.function, self._life), context=context)


def _is_lost(future: ProcessFuture) -> bool:
    return not future.done() or isinstance(future.exception(), BrokenProcessPool)


class _Process(multiprocessing.context.ForkServerProcess):
    """Imports nothing of the script that was started, which may have no `if __name__ == "__main__"`."""

    _lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
            try:
                super().start()
            finally:
                sys.modules["__main__"] = main


class _Context(multiprocessing.context.ForkServerContext):
    Process = _Process


_function: Any = None  # what this worker process calls; set once, by _start


def _start(function: Any, life: Connection) -> None:
    """Prepare a worker process."""
    global _function
    _function = function
    # The kernel kills this process when its owner is gone: a call without end may never run Python code again. The
    # settings belong to an open file: the pipe is opened anew, since all workers share the one that they were given.
    own = os.open(f"/proc/self/fd/{life.fileno()}", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler waits for Python code to run
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = size + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _call(**item: Any) -> Any:
    try:
        return finished(_function(**item))
    except Exception as error:
        return replace(Failure.of(error), cause=None)  # the exception itself may not be picklable


def finished(result: Any) -> Any:
    """The result of a call; a coroutine is run to its end."""

    async def run() -> Any:
        return await result

    return asyncio.run(run()) if inspect.isawaitable(result) else result
