"""Worker processes that share the work of the test bed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import connection
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called with (done, in all)."""
SECONDS_BETWEEN_LOOKS = 0.5
_channel: tuple[Any, Any] | None = None  # in a worker: the queue of messages, and the event that asks it to end


class Workers:
    """`count` processes with one CPU thread each; leave the `with` block to end them.

    By `fork` they start at once, where `spawn` costs each ten seconds of imports; but forked processes cannot use a
    GPU, and are to be made before this process has threads.
    """

    def __init__(self, count: int, start: str = "fork"):
        context = multiprocessing.get_context(start)
        self._messages, self._stop = context.SimpleQueue(), context.Event()
        self._pool = ProcessPoolExecutor(count, context, _begin, (self._messages, self._stop))
        self._pool.submit(int).result()  # a pool forks all its processes at its first call

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def run(self, calls: Sequence[Callable[[], T]], on_message: Callable[..., None]) -> list[T]:
        """Results of the calls, in their order; `on_message` hears what they `say` meanwhile.

        The first error of a call is raised here at once; a process that was killed is a RuntimeError.
        """
        try:
            futures = [self._pool.submit(call) for call in calls]
            running: set[Future] = set(futures)
            while running:
                done, running = wait(running, SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
                while not self._messages.empty():
                    on_message(*self._messages.get())
                for future in done:
                    future.result()
        except BrokenProcessPool as error:
            raise RuntimeError("a worker process was killed, most often for lack of memory; ask for fewer with "
                               "--processes, or for a smaller --batch-size") from error
        return [future.result() for future in futures]

    def map(self, task: Callable[[Sequence], T], rows: Sequence, most: int, progress: Progress) -> list[T]:
        """The task's result for each of the parts of at most `most` rows, in order; `progress` counts rows."""
        done = 0

        def add(count: int) -> None:
            nonlocal done
            done += count
            progress(done, len(rows))

        add(0)
        return self.run([partial(_counted, task, part) for part in parts(rows, most)], add)


def say(*message: Any) -> None:
    """Within a call: send the parent a message; ends the call if the parent stops it."""
    messages, stop = _channel
    if stop.is_set():
        raise SystemExit("the command is ending")
    messages.put(message)


def parts(rows: Sequence, most: int) -> list[Sequence]:
    """Rows cut into an even number of equal parts of at most `most`: cores come in even numbers."""
    count = min(len(rows), 2 * -(-len(rows) // (2 * most)))
    return [rows[len(rows) * i // count : len(rows) * (i + 1) // count] for i in range(count)]


def _counted(task: Callable[[Sequence], T], part: Sequence) -> T:
    result = task(part)
    say(len(part))
    return result


def _begin(messages: Any, stop: Any) -> None:
    global _channel
    _channel = messages, stop
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal: the parent sees to it
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
