"""Grades many items in worker processes that are killed when one item takes too long."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from verl.utils.children import ChildDied, SpawnedChild, serve
from verl.utils.import_utils import load_extern_object
from verl.utils.threads import run_if_coroutine
from verl.utils.user_code import full_traceback, user_frame

# The advice where a function asks multiprocessing for a process.
_MAY_NOT_START = (
    ". Rewards and environments run in daemonic processes, where multiprocessing cannot start others: use threads or "
    "subprocess. For rewards of a training run, reward_model.num_workers=0 permits it: they run in the trainer's "
    "process then (not with the manager prime)"
)
# What the fork server imports for the functions of a module, beyond this one; only where needed, as it is slow.
_PRELOAD_FOR = {"verl.reward.rules": ["verl.reward.rules", "math_verify"]}


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
        text += _MAY_NOT_START if str(error).startswith("daemonic processes") else ""
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


class GradingPool:
    """`workers` processes that call `function` on one item each, started on first use and replaced when killed.

    The function runs in the main thread of its process; coroutines are awaited there.
    """

    def __init__(self, function: Any, workers: int, seconds: float) -> None:
        self.function, self.workers, self.seconds = function, workers, seconds
        self._idle: list[SpawnedChild] = []
        self.restarts = 0

    def __reduce__(self) -> tuple:
        return GradingPool, (self.function, self.workers, self.seconds)

    def map(self, items: Sequence[dict[str, Any]]) -> list[Any]:
        """`function(**item)` of each item, in order; a Failure when it raised or took longer than `seconds`."""
        results: list[Any] = [None] * len(items)
        errors: list[BaseException] = []
        waiting = iter(range(len(items)))  # shared: each thread takes the next number

        def grade() -> None:
            try:
                for number in waiting:
                    results[number] = self._result(items[number])
            except BaseException as error:
                errors.append(error)
                list(waiting)  # the other threads end, too

        threads = [threading.Thread(target=grade, daemon=True) for _ in range(min(self.workers, len(items)))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            list(waiting)  # after an interrupt, no thread takes another item
        if errors:
            raise errors[0]
        return results

    def _result(self, item: dict[str, Any]) -> Any:
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = self._start()
        try:
            return worker.call(self.seconds, **item)
        except TimeoutError:
            return Failure("timeout", f"took longer than {self.seconds:g} s and was killed")
        except ChildDied as error:
            return Failure("error", f"ended its process with exit code {error.exit_code}")
        except Exception as error:  # the item cannot be pickled, or the result
            return Failure.of(error)
        finally:
            if worker.gone:
                self.restarts += 1
            else:
                self._idle.append(worker)

    def _start(self) -> SpawnedChild:
        preload = [__name__, *_PRELOAD_FOR.get(self.function.__module__, [])]
        worker = SpawnedChild(_work, self.function, preload=preload)
        try:
            worker.connection.recv_bytes()  # the function is loaded: imports do not count for the time of an item
        except EOFError as error:
            worker.end()
            message = f"a grading process could not load {self.function!r}; its error is above."
            raise FatalGradingError(message) from error
        return worker

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._idle:
            worker.end()
        self._idle = []


def _work(connection: Connection, function: Any) -> None:
    connection.send_bytes(b"ready")
    serve(connection, partial(_grade, function))


def _grade(function: Any, /, **item: Any) -> Any:
    try:
        return run_if_coroutine(function(**item))
    except Exception as error:
        return replace(Failure.of(error), cause=None)  # the exception itself may not be picklable
