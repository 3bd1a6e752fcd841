"""The rollouter with conversations that only wait: back pressure, slow prompts, syncs, drops, failures."""

import asyncio
import json
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from verl.agents.agent_loop.base import AgentLoopOutput
from verl.protocol import DataProto
from verl.trainer.fully_async.journal import JOURNAL_FILE, Journal, Timeline
from verl.trainer.fully_async.rollouter import Rollouter
from verl.trainer.fully_async.samples import Group, Sample
from verl.trainer.fully_async.staleness import StalenessBound

BATCH, N = 2, 2


class Servers:
    """Stands in for the server manager; a paused server interrupts every running conversation once."""

    def __init__(self):
        self.spans, self.calls, self.version = {}, [], 0
        self.clients, self.router = [SimpleNamespace(post=self.post)], SimpleNamespace(lost=set())
        self.free = asyncio.Event()
        self.free.set()
        self.rest = []  # futures of conversations that generate

    async def post(self, path, body, timeout=None):
        self.calls.append(path)
        if path == "pause_generation":
            self.free.clear()
            for waiting in self.rest:
                if not waiting.done():
                    waiting.set_result("aborted")
            await asyncio.sleep(0.01)
        else:
            self.free.set()

    async def generate(self, request, seconds):
        self.on_server(0, 1)
        done = 0
        while True:
            await self.free.wait()
            answer = asyncio.get_running_loop().create_future()
            self.rest.append(answer)
            try:
                reason = await asyncio.wait_for(asyncio.shield(answer), seconds)
            except TimeoutError:
                reason = "completed"
            self.rest.remove(answer)
            self.spans[request].append((self.version, 1))
            done += 1
            if reason == "completed":
                break
            self.on_interrupted(request, done)
        self.on_server(0, -1)
        return done


class Worker:
    """Conversations that take `seconds(number of the prompt)`; None of it is lost."""

    def __init__(self, seconds):
        self.server_manager, self.seconds = Servers(), seconds
        self.rollout_config = SimpleNamespace(server=SimpleNamespace(timeout=5.0))

    async def _run_agent_loop(self, params, info, **row):
        number = row["number"]
        seconds = self.seconds(number)
        if seconds is None:
            return None
        tokens = await self.server_manager.generate(row["request_id"], seconds)
        return AgentLoopOutput(prompt_ids=[1], response_ids=[2] * tokens, response_mask=[1] * tokens, reward_score=1.0)

    async def close(self):
        pass


class Run:
    """A rollouter with its journal; prompts are drawn two at a time, after `draw_s` seconds.

    `saved` is what `hold` returned, whose journal goes on.
    """

    def __init__(self, folder, seconds, threshold=0.0, sync_every=1, steps=8, stale="wait", draw_s=0.0, check=None,
                 worker=Worker, saved=None):
        settings = {"trigger_parameter_sync_step": sync_every, "staleness_threshold": threshold, "max_staleness": None,
                    "stale_samples": stale}  # fmt: skip
        self.bound, self.drawn, self.draw_s = StalenessBound.from_settings(settings, BATCH), 0, draw_s
        self.journal, self.timeline = Journal(), Timeline()
        self.file = folder / JOURNAL_FILE
        self.journal.open(self.file, saved and saved["journal"])
        self.worker = worker(seconds)
        options = {} if check is None else {"check_servers": check}
        self.rollouter = Rollouter(
            self.worker, self.bound, steps * BATCH, self.draw, None, 100, self.journal, self.timeline, **options
        )
        self.trained = []

    def draw(self):
        time.sleep(self.draw_s)
        groups = []
        for number in range(self.drawn, self.drawn + BATCH):
            columns = {"number": np.array([number], dtype=object), "uid": np.array([str(number)], dtype=object)}
            samples = [Sample(f"{number}/{k}", seed=k) for k in range(N)]
            groups.append(Group(number, DataProto(None, columns, {}), {}, number // BATCH + 1, samples))
            for sample in samples:
                self.journal.record(sample.id, "drawn", self.rollouter.version)
        self.drawn += BATCH
        return groups

    def sync(self, version, interrupt):
        def send():
            self.worker.server_manager.version = version

        self.rollouter.sync(version, ["server_0"], interrupt, send)

    def steps(self, first, last, sync_every=1, interrupt=True, train_s=0.0):
        for step in range(first, last + 1):
            if (step - 1) % sync_every == 0 and step > 1:
                self.sync(step - 1, interrupt)
            groups = self.rollouter.take(step, 30)
            self.bound.check(step, min(group.oldest_version for group in groups))
            time.sleep(train_s)
            for group in groups:
                self.trained.append(group.number)
                for sample in group.samples:
                    if sample.state == "queued":
                        self.journal.record(sample.id, "trained", step=step)
            self.journal.check()

    def states(self):
        seen = {}
        for line in self.file.read_text().splitlines():
            row = json.loads(line)
            seen.setdefault(row["sample"], []).append(row["state"])
        return seen


@contextmanager
def begun(folder, seconds, reward=None, saved=None, **options):
    """A run that has begun; `saved` is the state of a checkpoint of its start."""
    run = Run(folder, seconds, saved=saved, **options)
    run.rollouter.reward = reward
    try:
        if saved is not None:
            rows = [DataProto(None, {"number": np.array([group["number"]], dtype=object)}, {}) for group in
                    saved["groups"]]  # fmt: skip
            groups = [Group.load(group, row) for group, row in zip(saved["groups"], rows, strict=True)]
            run.rollouter.restore(groups, saved["dropped"], 0)
            run.drawn = groups[-1].number + 1
        run.sync(0, True)
        run.rollouter.begin()
        yield run
    finally:
        run.rollouter.close()
        run.journal.close()


@pytest.fixture
def start(tmp_path):
    """A function that begins a run in `tmp_path`, which ends with the test."""
    with ExitStack() as ends:
        yield lambda seconds, **options: ends.enter_context(begun(tmp_path, seconds, **options))


def test_a_slow_trainer_holds_generation_back(start):
    run = start(lambda number: 0.0, threshold=1.0)
    time.sleep(0.3)
    assert run.rollouter.started == 2 * BATCH and run.drawn == 2 * BATCH
    run.steps(1, 3)
    time.sleep(0.2)
    assert run.rollouter.started == 4 * BATCH
    run.steps(4, 8)
    assert run.rollouter.started == 8 * BATCH == run.drawn  # nothing is started for updates that do not come
    assert sorted(run.trained) == list(range(16))


def test_a_slow_source_of_prompts_is_waited_for(start):
    run = start(lambda number: 0.0, draw_s=0.1)
    run.steps(1, 4)
    assert run.trained == list(range(8))


@pytest.mark.parametrize("interrupt", [True, False])
def test_prompts_that_take_longer_are_trained_as_often_as_others(start, interrupt):
    run = start(lambda number: 0.12 if number % 4 == 0 else 0.001, threshold=1.0, steps=10)
    run.steps(1, 10, interrupt=interrupt, train_s=0.02)
    assert sorted(run.trained) == list(range(20))
    assert run.rollouter.dropped == 0
    seen = run.states()
    assert all(states[-1] == "trained" for states in seen.values())
    interruptions = [states.count("interrupted") for states in seen.values()]
    assert any(interruptions) is interrupt
    counts, seconds = run.rollouter.take_counts()
    expected = (20 * N, sum(map(bool, interruptions)), max(interruptions))
    assert (counts["samples"], counts["partial"], counts["longest"]) == expected and len(seconds) == 20 * N


def test_prompts_that_are_too_old_are_dropped_and_replaced(start):
    run = start(lambda number: 3600.0 if number == 1 else 0.01, threshold=1.0, stale="drop")
    run.steps(1, 8)
    assert len(run.trained) == 16 and 1 not in run.trained and run.rollouter.dropped == 1
    ends = Counter(states[-1] for states in run.states().values())
    assert ends["dropped_stale"] == N and ends["trained"] == 16 * N
    assert "1" not in {name.partition("/")[0] for name in run.rollouter.running}


def test_without_partial_rollouts_a_sync_waits_for_running_samples(start):
    run = start(lambda number: 0.5 if number == 3 else 0.0, threshold=1.0)
    run.steps(1, 1)
    time.sleep(0.1)  # prompt 3 has started
    started = time.monotonic()
    run.sync(1, interrupt=False)
    assert time.monotonic() - started > 0.1
    assert run.worker.server_manager.calls == ["pause_generation", "continue_generation"]  # of the start
    assert [group.number for group in run.rollouter.take(2, 30)] == [2, 3]
    assert not any("interrupted" in states for states in run.states().values())


def test_a_sample_that_fails_is_counted_and_its_group_is_complete(start):
    run = start(lambda number: None if number == 2 else 0.0)
    run.steps(1, 3)
    ends = Counter(states[-1] for states in run.states().values())
    assert ends["dropped_failed"] == N and run.trained == list(range(6))


def test_a_dead_server_ends_the_run(start):
    def check():
        raise RuntimeError("server_0 has ended")

    run = start(lambda number: None, check=check)
    with pytest.raises(RuntimeError, match="server_0 has ended"):
        run.rollouter.take(1, 30)


def test_a_step_without_a_batch_ends_within_the_time_limit(start):
    run = start(lambda number: 3600.0)
    with pytest.raises(RuntimeError, match="no complete batch within trainer.watchdog.generate=0.2 s.*'running': 4"):
        run.rollouter.take(1, 0.2)


@pytest.mark.parametrize("limit", [30, None])
def test_a_timeout_of_a_conversation_is_not_taken_for_that_of_the_step(start, limit):
    def out_of_time(number):
        raise TimeoutError("tool took 3 s")

    run = start(out_of_time)
    with pytest.raises(TimeoutError, match="^tool took 3 s$"):
        run.rollouter.take(1, limit)


def test_a_checkpoint_has_the_prompts_that_are_neither_trained_nor_dropped(start):
    run = start(lambda number: 3600.0 if number == 3 else 0.0, threshold=1.0)
    run.steps(1, 1)
    time.sleep(0.2)
    saved = json.loads(json.dumps(run.rollouter.hold()))
    assert [group["number"] for group in saved["groups"]] == [2, 3]
    assert {sample["state"] for group in saved["groups"] for sample in group["samples"]} == {"queued", "running"}
    run.rollouter.release()
    restored = [Group.load(group, DataProto(None, {}, {})) for group in saved["groups"]]
    assert restored[0].is_ready and not restored[1].is_ready
    assert restored[0].samples[0].output.reward_score == 1.0
    assert restored[0].oldest_version == 0
