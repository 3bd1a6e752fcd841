"""Distributes the tasks of an evaluation over processes that each load the models once."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import operator
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from scripts.spd_evaluation.harm import LabelledBlock

if TYPE_CHECKING:  # importing torch and transformers takes seconds; only the workers need them
    from scripts.spd_evaluation.worker import Outcome, Worker

REFRESH_S = 0.2
SECONDS_BETWEEN_LINES = 15.0  # of progress, where the output is no terminal


@dataclass(frozen=True)
class Job:
    """The input of every worker."""

    args: argparse.Namespace  # the command's arguments
    questions: dict[str, list[dict]]  # of each split: prompt_ids, ground_truth
    blocks: list[LabelledBlock]  # of test questions
    validation: list[LabelledBlock]

    def labelled(self, split: str) -> list[LabelledBlock]:
        """The labelled blocks of a split."""
        return {"test": self.blocks, "validation": self.validation}[split]


@dataclass(frozen=True)
class Run:
    """Decode the questions of one split with one rule; the result is a worker.Outcome."""

    split: str  # a key of Job.questions
    rule: str  # a key of Worker.judges, or "target": no draft at all
    threshold: float | None = None
    first: int = 0  # of the split's questions
    last: int | None = None  # the one after the last; None: all

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules and scorers that the result depends on."""
        return (self.rule,)

    def size(self, job: Job) -> int:
        """Answers, for the progress bar."""
        return len(job.questions[self.split][self.first : self.last]) * job.args.samples

    def parts(self, job: Job) -> list[Run]:
        """Runs over one batch of answers each, which different processes may take."""
        count, size = len(job.questions[self.split]), max(1, job.args.batch_size // job.args.samples)
        return [replace(self, first=i, last=min(i + size, count)) for i in range(0, count, size)]

    def perform(self, worker: Worker) -> Outcome:
        return worker.decode(self)

    @staticmethod
    def joined(outcomes: list[Outcome]) -> Outcome:
        """The outcome of a run from those of its parts."""
        return functools.reduce(operator.add, outcomes)

    @staticmethod
    def to_json(outcome: Outcome) -> Any:
        return asdict(outcome)

    @staticmethod
    def from_json(value: Any) -> Outcome:
        from scripts.spd_evaluation.worker import Outcome, SpecResult

        return Outcome(SpecResult(**value["result"]), value["correct"])


class _Undivided:
    """A task that one process performs, since results of its parts could not be joined."""

    def parts(self, job: Job) -> list[_Undivided]:
        return [self]

    @staticmethod
    def joined(outcomes: list) -> Any:
        return outcomes[0]

    @staticmethod
    def to_json(outcome: Any) -> Any:
        return outcome

    from_json = to_json


@dataclass(frozen=True)
class Harm(_Undivided):
    """Judge the labelled blocks by the rules of `runs`; the result is their (harmless, harmful) shares in order."""

    runs: tuple[Run, ...]

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules and scorers that the result depends on."""
        return tuple(run.rule for run in self.runs)

    def size(self, job: Job) -> int:
        """Blocks, for the progress bar."""
        return len(job.blocks)

    def perform(self, worker: Worker) -> list[tuple[float | None, float | None]]:
        return worker.harm_shares(self)


@dataclass(frozen=True)
class Scores(_Undivided):
    """Score the labelled blocks of a split; the result is harm.labelled_scores."""

    rules: tuple[str, ...]  # keys of Worker.values
    split: str = "validation"

    def size(self, job: Job) -> int:
        """Blocks, for the progress bar."""
        return len(job.labelled(self.split))

    def perform(self, worker: Worker) -> dict[str, list[list[tuple[float, bool]]]]:
        return worker.labelled_scores(self)


Task = Run | Harm | Scores  # independent of all others; the same result in every process


class Pool:
    """Processes that take parts of tasks in the order of `submit`; leaving the `with` block ends them at once.

    On CUDA each process sees one GPU, the next one of `visible_gpus`. The result of a finished part is written to the
    file that `file_of` names, if it is given; parts whose file exists are not computed again.
    """

    def __init__(self, job: Job, processes: int, progress: Progress, file_of: Callable[[Task], Path] | None = None):
        context = multiprocessing.get_context("spawn")  # a forked process can use neither CUDA nor torch's threads
        self.job, self._file_of = job, file_of
        self._done = context.Value("q", 0)
        leash, self._hand = context.Pipe(duplex=False)
        gpus = visible_gpus() if job.args.device == "cuda" else []
        given = (job, self._done, context.Value("q", 0), gpus, leash)
        self._executor = ProcessPoolExecutor(processes, context, initializer=_start_worker, initargs=given)
        self._futures: dict[Task, list[Future]] = {}  # of each task its parts
        self._progress = progress
        self._bar = progress.add_task("loading models", total=0)
        self._began = self._spoke = time.monotonic()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self._hand.close()
        self._executor.shutdown(cancel_futures=True)

    def submit(self, tasks: Iterable[Task]) -> None:
        """Queue the tasks that are not queued yet: the first part of each, then the second.

        A process then decodes the same prompts by several rules in turn, and reads them once.
        """
        new = {task: task.parts(self.job) for task in tasks if task not in self._futures}
        self._futures |= {task: [] for task in new}
        for row in itertools.zip_longest(*new.values()):
            for task, part in zip(new, row, strict=True):
                if part is not None:
                    self._futures[task].append(self._begun(part))

    def _begun(self, part: Task) -> Future:
        if self._file_of is None:
            return self._executor.submit(_perform, part)
        file = self._file_of(part)
        if file.exists():
            with self._done.get_lock():
                self._done.value += part.size(self.job)
            known: Future = Future()
            known.set_result(part.from_json(json.loads(file.read_text())))
            return known
        future = self._executor.submit(_perform, part)
        future.add_done_callback(functools.partial(_keep, part, file))
        return future

    def result(self, task: Task) -> Any:
        """Wait for a task and return its result; raises the first error of any task."""
        while True:
            self._raise_and_show()
            if all(future.done() for future in self._futures[task]):
                return task.joined([future.result() for future in self._futures[task]])
            running = [future for parts in self._futures.values() for future in parts if not future.done()]
            wait(running, timeout=REFRESH_S, return_when=FIRST_COMPLETED)

    def _raise_and_show(self) -> None:
        ended = [parts for parts in self._futures.values() if all(future.done() for future in parts)]
        for future in (future for parts in self._futures.values() for future in parts if future.done()):
            try:
                future.result()
            except BrokenProcessPool as error:
                raise RuntimeError("a worker was killed, often for want of memory; give fewer --processes") from error
        total = sum(task.size(self.job) for task in self._futures)
        if self._done.value:
            text = f"{len(ended)} of {len(self._futures)} runs"
            self._progress.update(self._bar, description=text, total=total, completed=self._done.value)
        now, done = time.monotonic(), self._done.value
        if not self._progress.console.is_terminal and now - self._spoke > SECONDS_BETWEEN_LINES:
            self._spoke, rate = now, done / (now - self._began)
            left = f"about {(total - done) / rate / 60:.1f} minutes left" if done else "models are being loaded"
            self._progress.console.print(
                f"{len(ended)} of {len(self._futures)} runs, {done} of {total} answers and labelled blocks, "
                f"{rate:.1f} a second, {left}", soft_wrap=True, highlight=False
            )  # fmt: skip


def _keep(part: Task, file: Path, future: Future) -> None:
    if future.cancelled() or future.exception() is not None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(part.to_json(future.result())))
    os.replace(partial, file)


def visible_gpus() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


_given: Sequence = ()  # the arguments of this process's Worker


def _start_worker(*given: Any) -> None:
    """Prepare a process. Nothing here may fail: an error of an initializer never reaches the parent."""
    global _given
    *_given, started, gpus, leash = given
    if gpus:
        with started.get_lock():
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[started.value % len(gpus)]
            started.value += 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    threading.Thread(target=_end_with, args=(leash,), daemon=True).start()


def _end_with(leash: Connection) -> None:
    """End this process when the other end of the pipe is closed, by Pool or by the end of the parent."""
    leash.poll(None)
    os._exit(1)


@functools.cache
def _worker() -> Worker:
    from scripts.spd_evaluation.worker import Worker

    return Worker(*_given)


def _perform(task: Task) -> Any:
    return task.perform(_worker())
