"""Keeps servers busy with the conversations of one prompt after the other, in a thread of the trainer's process."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any

from loguru import logger

from verl.agents.agent_loop.interruptible import InterruptibleWorker
from verl.agents.agent_loop.rows import is_lost
from verl.agents.agent_loop.worker import SEED, get_trajectory_info
from verl.protocol import DataProto
from verl.reward.pool import Failure
from verl.reward.stream import RewardStream
from verl.trainer.fully_async import journal
from verl.trainer.fully_async.journal import Journal, Timeline
from verl.trainer.fully_async.samples import UNGRADED, Group, Sample
from verl.trainer.fully_async.staleness import StalenessBound

STARTABLE = (journal.INTERRUPTED, journal.DRAWN)  # states from which a sample runs


class Rollouter:
    """Starts prompts, runs their samples, grades them, and hands full batches to the trainer.

    All its state belongs to one event loop in a thread of its own; the methods below the line are for other threads.

    Args:
        worker: runs conversations; its server manager interrupts and continues them.
        bound: how many prompts may be started, and which ones a step takes.
        total: prompts of the run.
        draw: the next groups of the data, [] at the end; called in a thread, one call at a time.
        reward: grades samples, None where the conversations bring their scores.
        concurrency: samples that run at the same time.
        records, timeline: where changes of state and spans are entered.
        check_servers: raises if a server has ended; called in a thread after a generation failed.
    """

    def __init__(
        self, worker: InterruptibleWorker, bound: StalenessBound, total: int, draw: Callable[[], list[Group]],
        reward: RewardStream | None, concurrency: int, records: Journal, timeline: Timeline,
        check_servers: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.worker, self.bound, self.draw, self.reward = worker, bound, draw, reward
        self.total, self.check_servers = total, check_servers
        self.journal, self.timeline = records, timeline
        self.concurrency = concurrency
        self.version = 0  # that servers hold
        self.groups: dict[int, Group] = {}  # that were started and not taken, by number
        self.waiting: list[Group] = []  # that were drawn and not started
        self.started = self.dropped = 0  # prompts
        self.error: BaseException | None = None
        self.running: dict[str, tuple[asyncio.Task, Sample]] = {}  # by request id
        self.span_counts: Counter[str] = Counter()  # of samples since `take_counts`
        self.seconds: list[float] = []  # of samples since `take_counts`
        self._in_flight: Counter[int] = Counter()  # requests by server
        self._may_run = False  # no sample starts during a weight sync
        self._syncing = False
        self._drawing = self._held = False
        self._attempts = 0
        manager = worker.server_manager
        manager.on_interrupted, manager.on_server = self._interrupted, self._server_used
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Condition()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="rollouter")
        self._thread.start()
        self._feeder: Future | None = None

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, condition: Callable[[], Any]) -> Any:
        """The first true value of the condition. Raises what made the generation fail."""
        async with self._changed:
            while True:
                if self.error is not None:
                    raise self.error
                if value := condition():
                    return value
                await self._changed.wait()

    async def _feed(self) -> None:
        """Start prompts as long as the bound permits, and draw more."""
        try:
            while True:
                await self._until(self._may_start)
                if not self.waiting:
                    self._drawing = True
                    self.waiting += await asyncio.to_thread(self.draw)
                    self._drawing = False
                    await self._notify()
                    continue  # a sync may have begun meanwhile
                group = self.waiting.pop(0)
                group.started_at = self.version
                self.groups[group.number] = group
                self.started += 1
                self._start(group)
        except Exception as error:
            await self._fail(error)

    def _may_start(self) -> bool:
        limit = min(self.bound.may_start(self.version, self.dropped), self.total + self.dropped)
        return self._may_run and not self._held and self.started < limit and len(self.running) < self.concurrency

    def _start(self, group: Group) -> None:
        """Run the samples of a group that are not finished."""
        for k, sample in enumerate(group.samples):
            if sample.state in STARTABLE and sample.output is None:
                self._attempts += 1
                request = f"{sample.id}/{self._attempts}"
                task = self._loop.create_task(self._run(group, k, sample, request))
                self.running[request] = task, sample
            elif sample.state in (journal.FINISHED, journal.GRADED):
                self._loop.create_task(self._finish(group, sample))

    async def _run(self, group: Group, k: int, sample: Sample, request: str) -> None:
        started = time.monotonic()
        try:
            await self._until(lambda: self._may_run)
            self._enter(sample, journal.RUNNING)
            sample.started_at = self.version
            spans = self.worker.server_manager.spans[request] = []
            row = {name: column[0] for name, column in group.row.non_tensor_batch.items()}
            index = [row.get("sample_index", group.number)]
            (info,) = await get_trajectory_info(group.step, index, validate=False)
            arguments = {**row, SEED: sample.seed, "request_id": request}
            output = await self.worker._run_agent_loop(dict(group.params), {**info, "rollout_n": k}, **arguments)
            sample.spans = spans
            sample.seconds = time.monotonic() - started
            if output is None:  # no server answered, or the conversation was too long
                await asyncio.to_thread(self.check_servers)
            if is_lost(output):
                self._enter(sample, journal.FAILED, reason="generation")
            else:
                sample.output = output
                if sample.state == journal.INTERRUPTED:  # a program ended without waiting for its last request
                    self._enter(sample, journal.RUNNING)
                self._enter(sample, journal.FINISHED, tokens=len(output.response_ids))
        except Exception as error:
            return await self._fail(error)
        finally:
            self.worker.server_manager.spans.pop(request, None)
            self.running.pop(request, None)
            await self._notify()
        if sample.state == journal.FINISHED:
            await self._finish(group, sample)

    async def _finish(self, group: Group, sample: Sample) -> None:
        """Grade a sample and put it into the queue."""
        try:
            started = time.monotonic()
            if sample.result is UNGRADED and self.reward is not None and sample.output.reward_score is None:
                row = self.worker._batch_of([sample.output])
                row = DataProto(row.batch, {**group.row.non_tensor_batch, **row.non_tensor_batch}, {})
                index = group.number * len(group.samples) + group.samples.index(sample)
                sample.result = await self.reward.grade(index, row)
            sample.seconds += time.monotonic() - started
            if group.number not in self.groups:  # dropped meanwhile
                return
            if sample.state == journal.FINISHED:
                self._enter(sample, journal.GRADED)
            self._enter(sample, journal.QUEUED)
            self.seconds.append(sample.seconds)
            self.span_counts["samples"] += 1
            versions = len({version for version, _ in sample.spans})
            self.span_counts["partial"] += versions > 1
            self.span_counts["longest"] = max(self.span_counts["longest"], versions - 1)
            await self._notify()
        except Exception as error:
            await self._fail(error)

    def _enter(self, sample: Sample, state: str, **more: Any) -> None:
        self.journal.record(sample.id, state, self.version, **more)
        sample.state = state

    async def _fail(self, error: BaseException) -> None:
        if self.error is None:
            logger.error(f"asynchronous generation failed: {type(error).__name__}: {error}")
            self.error = error
        await self._notify()

    def _interrupted(self, request: str, tokens: int) -> None:
        if request not in self.running:
            return
        _, sample = self.running[request]
        if sample.state == journal.INTERRUPTED:  # another one of its parallel requests was interrupted before
            return
        self._enter(sample, journal.INTERRUPTED, tokens=tokens)
        if not self._syncing:  # the answer came late
            self._enter(sample, journal.RUNNING)

    def _server_used(self, server: int, change: int) -> None:
        self._in_flight[server] += change
        if not self._syncing and self._in_flight[server] in (0, 1):
            self.timeline.enter(f"server_{server}", "generate" if self._in_flight[server] else "idle", self.version)

    def _drop(self, group: Group, step: int) -> None:
        """Drop a group that is too old, and end its running samples."""
        del self.groups[group.number]
        self.dropped += 1
        for task, sample in list(self.running.values()):
            if sample in group.samples:
                task.cancel()
        for sample in group.samples:
            if sample.state not in journal.ENDS:
                self._enter(sample, journal.STALE, reason="too old", step=step)

    # For other threads.

    def call(self, coroutine: Coroutine, what: str = "a call did not end", limit: float | None = None) -> Any:
        """What a coroutine in the loop returns or raises.

        After `limit` seconds the error of `check_servers`, or a RuntimeError that names `what`.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        wait([future], limit)
        if future.done():
            return future.result()
        future.cancel()
        states = Counter(sample.state for group in list(self.groups.values()) for sample in group.samples)
        self.check_servers()
        raise RuntimeError(
            f"{what} within trainer.watchdog.generate={limit:g} s; states of the started samples: {dict(states)}. "
            "Raise the limit if generation is only slow."
        )

    def begin(self) -> None:
        """Start prompts from now on, and run those that `restore` took."""

        async def start() -> None:
            for group in self.groups.values():
                self._start(group)

        self.call(start())
        self._feeder = asyncio.run_coroutine_threadsafe(self._feed(), self._loop)

    def sync(
        self, version: int, servers: list[str], interrupt: bool, send: Callable[[], None], limit: float | None = None
    ) -> None:
        """Let no generation run, call `send`, which gives all servers the weights of `version`, and continue.

        With `interrupt` running generations stop after a token and continue with the new weights; else all running
        samples are waited for. `servers` are the names in the timeline. RuntimeError after `limit` seconds.
        """
        work = self._sync(version, servers, interrupt, send)
        self.call(work, f"the weight sync of version {version} did not end", limit)

    async def _sync(self, version: int, servers: list[str], interrupt: bool, send: Callable[[], None]) -> None:
        self._may_run = False
        clients = self.worker.server_manager.clients
        if not interrupt:
            await self._until(lambda: all(s.state != journal.RUNNING for _, s in self.running.values()))
        self._syncing = True
        for name in servers:
            self.timeline.enter(name, "sync", version)
        limit = self.worker.rollout_config.server.timeout
        if interrupt:
            await asyncio.gather(*(client.post("pause_generation", {"mode": "abort"}, limit) for client in clients))
        await asyncio.to_thread(send)
        self.worker.server_manager.router.lost.clear()  # all servers took the weights
        self.version = version
        if interrupt:
            await asyncio.gather(*(client.post("continue_generation", {}, limit) for client in clients))
        self._syncing = False
        for _, sample in self.running.values():
            if sample.state == journal.INTERRUPTED:
                self._enter(sample, journal.RUNNING)
        for i, name in enumerate(servers):
            self.timeline.enter(name, "generate" if self._in_flight[i] else "idle", version)
        self._may_run = True
        await self._notify()

    def take(self, step: int, limit: float | None = None) -> list[Group]:
        """The groups of step `step`, by number, once they are complete; RuntimeError after `limit` seconds."""
        return self.call(self._take(step), f"step {step} had no complete batch", limit)

    async def _take(self, step: int) -> list[Group]:
        def chosen() -> list[Group] | None:
            for group in self.bound.expired(step, list(self.groups.values())):
                self._drop(group, step)
            return self.bound.choose(step, list(self.groups.values()))

        groups = await self._until(chosen)
        for group in groups:
            del self.groups[group.number]
        await self._notify()
        return groups

    def take_counts(self) -> tuple[Counter[str], list[float]]:
        """Since the last call: samples, those of several versions (partial), the most syncs within one (longest).

        Also the seconds of each sample, from its start to its grade.
        """

        async def take() -> tuple[Counter[str], list[float]]:
            counts, self.span_counts = self.span_counts, Counter()
            seconds, self.seconds = self.seconds, []
            return counts, seconds

        return self.call(take())

    def hold(self) -> dict[str, Any]:
        """Draw no prompts until `release`; the groups that are neither trained nor dropped, and the journal's state."""

        async def snapshot() -> dict[str, Any]:
            self._held = True
            await self._until(lambda: not self._drawing)
            groups = sorted([*self.groups.values(), *self.waiting], key=lambda group: group.number)
            saved = [group.saved() for group in groups]
            return {"groups": saved, "journal": self.journal.state(), "dropped": self.dropped}

        return self.call(snapshot())

    def release(self) -> None:
        """Draw prompts again."""

        async def resume() -> None:
            self._held = False
            await self._notify()

        self.call(resume())

    def restore(self, groups: list[Group], dropped: int, step: int) -> None:
        """Take the groups of a checkpoint of `step`; those that were started go on with `begin`."""

        async def take_over() -> None:
            self.version = step
            for group in groups:
                if all(sample.state == journal.DRAWN for sample in group.samples):
                    self.waiting.append(group)
                    continue
                self.groups[group.number] = group
                for sample in group.samples:
                    if sample.state == journal.QUEUED and isinstance(sample.result, Failure):
                        sample.result = UNGRADED
                        self._enter(sample, journal.FINISHED, tokens=len(sample.output.response_ids), reason="resume")
                    elif sample.state == journal.RUNNING or (sample.output is None and sample.state in STARTABLE):
                        sample.restart()
                        if sample.state == journal.RUNNING:
                            self._enter(sample, journal.INTERRUPTED, tokens=0, reason="resume")
                group.started_at = step  # that of samples which start again
            self.dropped = dropped
            self.started = step * self.bound.batch + len(self.groups) + dropped

        self.call(take_over())

    def close(self) -> None:
        """End all conversations and the thread."""

        async def end() -> None:
            tasks = [task for task, _ in self.running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.worker.close()

        if self._feeder is not None:
            self._feeder.cancel()
        try:
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(20)
        except Exception as error:
            logger.warning(
                f"closing the rollout failed with {error!r}; {len(self.running)} conversations are left open, whose "
                "programs and connections may go on"
            )
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        if self.reward is not None:
            self.reward.close()
