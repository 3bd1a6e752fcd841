"""Threads next to an event loop, and coroutines in blocking code."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any


async def in_thread(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """The result of a blocking call, made in a thread of its own.

    Unlike with `asyncio.to_thread`, a call that hangs takes no thread from others and does not keep the process from
    ending. If the awaiting task is cancelled, the thread runs to its end and its result is discarded.
    """
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def resolve(method: Callable, value: Any) -> None:
        if not future.done():
            method(value)

    def run() -> None:
        try:
            outcome = (future.set_result, function(*args, **kwargs))
        except BaseException as error:  # also SystemExit: it may end neither the process nor the loop
            if not isinstance(error, Exception) or isinstance(error, StopIteration):  # a future refuses StopIteration
                error = RuntimeError(f"{type(error).__name__}: {error}")
            outcome = (future.set_exception, error)
        try:
            loop.call_soon_threadsafe(resolve, *outcome)
        except RuntimeError:
            pass  # the loop was closed while the call hung

    threading.Thread(target=run, name=f"call of {getattr(function, '__name__', function)}", daemon=True).start()
    return await future


def run_if_coroutine(result: Any) -> Any:
    """The result of a call; an awaitable is run to its end in a new event loop."""

    async def run() -> Any:
        return await result

    return asyncio.run(run()) if inspect.isawaitable(result) else result
