"""Worker processes that share the work of the test bed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from loguru import logger

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")
Progress = Callable[..., None]
"""Called with (done, in all), and with a name where a phase has several parts."""
SECONDS_BETWEEN_LOOKS = 0.5
START_TIMEOUT_S = 600  # of Ray's actors
_channel: tuple[Any, Any] | None = None  # in a worker: the queue of messages, and the event that asks it to end
_part = 0  # in a worker: number of the part that `map` has given it


class Workers:
    """`count` processes with one CPU thread each; leave the `with` block to end them.

    By `fork` they start at once, where `spawn` costs each ten seconds of imports; but forked processes cannot use a
    GPU, and are to be made before this process has threads.
    """

    def __init__(self, count: int, start: str = "fork"):
        context = multiprocessing.get_context(start)
        self._messages, self._stop = context.SimpleQueue(), context.Event()
        self._count = count
        self._pool = ProcessPoolExecutor(count, context, _begin, (self._messages, self._stop))
        self._pool.submit(int).result()  # a pool forks all its processes at its first call

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def run(self, calls: Sequence[Callable[[], T]], on_message: Callable[..., None]) -> list[T]:
        """Results of the calls, in their order; `on_message` hears what they `say` meanwhile."""
        results = dict(self.finished(calls, on_message))
        return [results[number] for number in range(len(calls))]

    def finished(
        self, calls: Sequence[Callable[[], T]], on_message: Callable[..., None] = lambda *_: None
    ) -> Iterator[tuple[int, T]]:
        """(number, result) of each call as soon as it is there.

        The first error of a call is raised here at once; a process that was killed is a RuntimeError.
        """
        try:
            futures = {self._pool.submit(call): number for number, call in enumerate(calls)}
            running: set[Future] = set(futures)
            while running:
                done, running = wait(running, SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
                while not self._messages.empty():
                    on_message(*self._messages.get())
                for future in done:
                    yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise RuntimeError("a worker process was killed, most often for lack of memory; ask for fewer with "
                               "--processes, or for a smaller --batch-size") from error

    def map(
        self, task: Callable[[Sequence], Any], rows: Sequence, most: int, progress: Progress, kept: Path | None = None
    ) -> list[Any]:
        """The task's result, which JSON can hold, for each of the parts of at most `most` rows, in order.

        `progress` counts rows, with the shares of running parts that their tasks report by `report_share`. Finished
        parts are written to the folder `kept`; those that exist are not done again.
        """
        pieces = parts(rows, most, self._count)
        # The cut depends on the number of processes, so a run with another number does its parts again.
        files = [] if kept is None else [kept / f"{i}-of-{len(pieces)}.json" for i in range(len(pieces))]
        results = {i: json.loads(file.read_text()) for i, file in enumerate(files) if file.exists()}
        if results:
            logger.info("{} of {} parts are there from an earlier run", len(results), len(pieces))
        done = sum(len(pieces[i]) for i in results)
        progress(done, len(rows))
        missing = [i for i in range(len(pieces)) if i not in results]
        shares: dict[int, float] = {}

        def heard(part: int, share: float) -> None:
            shares[part] = share
            progress(done + sum(len(pieces[i]) * share for i, share in shares.items() if i not in results), len(rows))

        for number, result in self.finished([partial(_do_part, task, i, pieces[i]) for i in missing], heard):
            i = missing[number]
            text = json.dumps(result)
            if kept is not None:
                kept.mkdir(parents=True, exist_ok=True)
                (kept / "partial").write_text(text)
                os.replace(kept / "partial", files[i])
            results[i] = json.loads(text)  # the same types as from a file
            done += len(pieces[i])
            progress(done, len(rows))
        return [results[i] for i in range(len(pieces))]


class RayWorkers(Workers):
    """The same as Ray actors on the nodes of a cluster, each with `gpus` GPUs (0: a CPU) of its own.

    Joins the cluster of RAY_ADDRESS, else starts one on this machine. `count` None: as many as fit.
    """

    def __init__(self, count: int | None, gpus: int):
        import ray

        self._began = not ray.is_initialized()
        if self._began:
            variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
            ray.init(log_to_driver=False, runtime_env={"env_vars": variables})
        kind, each = ("GPU", gpus) if gpus else ("CPU", 1)
        have = [int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]]
        fitting = sum(number // each for number in have)
        if (count or 1) > fitting:
            raise ValueError(f"{count or 1} x {each} {kind}s are asked for, but the nodes of the Ray cluster have "
                             f"{have}; lower --processes or --tensor-parallel")
        self._count = count = count or fitting
        actor = ray.remote(num_gpus=gpus, num_cpus=1)(_Performer)
        self._actors = [actor.remote() for _ in range(count)]
        ready = [actor.__ray_ready__.remote() for actor in self._actors]
        begun, _ = ray.wait(ready, num_returns=count, timeout=START_TIMEOUT_S)
        if len(begun) < count:
            self.__exit__()
            raise RuntimeError(f"{len(begun)} of {count} actors with {each} {kind}s each started within "
                               f"{START_TIMEOUT_S} s: others use the cluster too; lower --processes to what is free")

    def __exit__(self, *error: object) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)
        if self._began:
            ray.shutdown()

    def finished(
        self, calls: Sequence[Callable[[], T]], on_message: Callable[..., None] = lambda *_: None
    ) -> Iterator[tuple[int, T]]:
        """As `Workers.finished`; nothing is heard of a call before its result."""
        import ray

        waiting, running = list(enumerate(calls))[::-1], {}
        free = list(self._actors)
        while waiting or running:
            while waiting and free:
                number, call = waiting.pop()
                actor = free.pop()
                running[actor.perform.remote(call)] = number, actor
            (done,), _ = ray.wait(list(running))
            number, actor = running.pop(done)
            free.append(actor)
            yield number, ray.get(done)


class _Performer:
    def perform(self, call: Callable[[], Any]) -> Any:
        return call()


def say(*message: Any) -> None:
    """Within a call: send the parent a message; ends the call if the parent stops it."""
    if _channel is None:  # an actor of Ray
        return
    messages, stop = _channel
    if stop.is_set():
        raise SystemExit("the command is ending")
    messages.put(message)


def report_share(share: float) -> None:
    """Within a task of `Workers.map`: send the parent the share of its rows that is done."""
    say(_part, share)


def _do_part(task: Callable[[Sequence], Any], part: int, rows: Sequence) -> Any:
    global _part
    _part = part
    return task(rows)


def parts(rows: Sequence, most: int, processes: int) -> list[Sequence]:
    """Rows cut into equal parts of at most `most`, as many for each of the processes."""
    count = min(len(rows), processes * -(-len(rows) // (processes * most)))
    return [rows[len(rows) * i // count : len(rows) * (i + 1) // count] for i in range(count)]


def _begin(messages: Any, stop: Any) -> None:
    global _channel
    _channel = messages, stop
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal: the parent sees to it
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
