"""Grades samples while others are still generated."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.reward.managers.base import SampleRewardManager
from verl.reward.managers.naive import NaiveRewardManager
from verl.reward.rows import GRADED, rows_of


def can_stream(reward_fn: Any) -> bool:
    """Whether the manager scores each sample by itself, by its own `__call__`, so that samples can be graded early."""
    is_standard = type(reward_fn).__call__ in (SampleRewardManager.__call__, NaiveRewardManager.__call__)
    return isinstance(reward_fn, SampleRewardManager) and is_standard and reward_fn.can_stream


class RewardStream:
    """Calls a reward manager, for which `can_stream` holds, on samples as they finish, in a thread of its own.

    A `concurrent` manager grades all finished samples at the same time; the others get those that finished since their
    last call. Results, failures included, become the column `__graded__`, which the manager's `__call__` reads: what
    follows from a failure is decided there.
    """

    def __init__(self, reward_fn: SampleRewardManager) -> None:
        self.reward_fn = reward_fn
        self.results: dict[int, Any] = {}
        self.busy_s = 0.0  # seconds in which at least one sample was being graded
        self._grading, self._since = 0, 0.0
        self._waiting: list[tuple[int, DataProto]] = []
        self._one_call = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="reward-stream")
        self._thread.start()
        self._calls: list[Future[None]] = []
        self._latest: dict[int, Future[None]] = {}  # of each row

    def put(self, index: int, sample: DataProto) -> None:
        """Grade a batch of one sample, which is row `index` of the later batch; a second one takes its place."""
        if self.reward_fn.concurrent:
            if index in self._latest:
                self._latest[index].cancel()
            call = self._timed(self._grade_one, index, sample)
        else:
            call = self._timed(self._grade_waiting, index, sample)
        self._latest[index] = asyncio.run_coroutine_threadsafe(call, self._loop)
        self._calls.append(self._latest[index])

    async def grade(self, index: int, sample: DataProto) -> Any:
        """The result of a batch of one sample, for a caller in another event loop; `finish` does not know it."""
        self.put(index, sample)
        call = self._latest.pop(index)
        await asyncio.wrap_future(call)
        self._calls.remove(call)
        return self.results.pop(index)

    def finish(self, samples: DataProto) -> dict[str, float]:
        """Wait for all grades and put them into `samples`. Returns seconds of grading, and those spent waiting here."""
        started = time.perf_counter()
        try:
            for call in self._calls:
                if not call.cancelled():
                    call.result()
        finally:
            self.close()
        column = np.empty(len(samples), dtype=object)
        for index, result in self.results.items():
            column[index] = result
        samples.non_tensor_batch[GRADED] = column
        prefix = "timing_s/agent_loop/reward"
        return {f"{prefix}/busy": self.busy_s, f"{prefix}/exposed": time.perf_counter() - started}

    def close(self) -> None:
        """End the thread; samples that are still being graded are given up."""
        for call in self._calls:
            call.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _timed(self, grade: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        self._grading += 1
        if self._grading == 1:
            self._since = time.perf_counter()
        try:
            await grade(*arguments)
        finally:
            self._grading -= 1
            if not self._grading:
                self.busy_s += time.perf_counter() - self._since

    async def _grade_one(self, index: int, sample: DataProto) -> None:
        self.results[index] = await self.reward_fn.result_of(sample)

    async def _grade_waiting(self, index: int, sample: DataProto) -> None:
        self._waiting.append((index, sample))  # here, since only this thread may touch the list
        async with self._one_call:  # samples gather meanwhile
            if not self._waiting:
                return
            taken, self._waiting = self._waiting, []
            rows = [row for _, sample in taken for row in rows_of(sample, self.reward_fn.reward_fn_key)]
            results = await asyncio.to_thread(self.reward_fn.results_of_rows, rows)
            self.results.update(zip((index for index, _ in taken), results, strict=True))
