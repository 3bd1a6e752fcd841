"""A discrete-event simulation of one asynchronous run: how busy its sides are, how old its samples.

Events are the ends of prefills, of turns, of tool calls, updates and weight syncs. A server shares its tokens per
second among its sequences. A run follows the rules of `async_training` (docs/async.md) with stale_samples=wait.
Grading, validation and checkpoints take no time in it.
"""

import functools
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

Table = tuple[tuple[float, float], ...]


@functools.cache
def at_concurrency(table: Table, sequences: int) -> float:
    """Tokens per second of a server that runs so many sequences: interpolated, constant outside of the table.

    `table` has pairs (sequences, tokens per second) in ascending order.
    """
    return float(np.interp(sequences, *zip(*table, strict=True)))


@dataclass(frozen=True)
class Rates:
    """Speeds of the hardware, measured or assumed.

    decode, prefill: tokens per second of one server by the number of sequences that it runs (`at_concurrency`).
    update_s: seconds of an update on one rank, which ranks share evenly; update_fixed_s: those that they do not share.
    sync_s: seconds of a weight sync, in which neither side works.
    """

    decode: Table
    prefill: Table = ((1, math.inf),)
    update_s: float = 0.0
    update_fixed_s: float = 0.0
    sync_s: float = 0.0

    def seconds_of_update(self, ranks: int) -> float:
        return self.update_fixed_s + self.update_s / ranks


@dataclass(frozen=True)
class Spread:
    """Log-normal numbers with this mean and coefficient of variation (0: constant), cut at `longest`."""

    mean: float
    cv: float = 0.0
    longest: float = math.inf

    def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Numbers [size]; the cut lowers their mean."""
        sigma = math.sqrt(math.log1p(self.cv**2))
        numbers = self.mean * np.exp(sigma * rng.standard_normal(size) - sigma**2 / 2)
        return np.minimum(numbers, self.longest)


@dataclass(frozen=True)
class Workload:
    """The samples of a run: `prompts` of an update, with `n` samples each, whose tokens are spread over `turns`.

    Between two turns a tool is called for `tool_s`, while the sample is on no server; its result adds `tool_tokens`.
    """

    prompts: int
    n: int
    response: Spread
    prompt_tokens: int = 0
    turns: int = 1
    tool_s: Spread = Spread(0.0)
    tool_tokens: int = 0


@dataclass(frozen=True)
class Schedule:
    """Keys of `async_training`; `concurrency` is the number of sequences that a server runs at once."""

    sync_step: int = 4
    staleness_threshold: float = 0.1
    partial_rollout: bool = True
    concurrency: int = 256

    @property
    def updates_allowed(self) -> int:
        """Updates by which the oldest token of a trained sample may be behind: those that the started prompts fill."""
        return math.ceil(round((1 + self.staleness_threshold) * self.sync_step, 6)) - 1

    def prompts_allowed(self, prompts: int) -> int:
        """Prompts between two syncs, those left from before included."""
        return int(round((1 + self.staleness_threshold) * self.sync_step * prompts, 6))


@dataclass(frozen=True)
class Outcome:
    """What a simulated run did after its first sync, until its last update.

    Attributes:
        steps_per_hour: updates.
        train_idle, generate_idle: shares of the time in which the trainer waits, and in which a server runs no
            sequence (mean over servers), syncs not counted.
        sync: share of the time in weight syncs.
        staleness: trained samples by the updates between the weights of their oldest token and the trained ones.
        spans: trained samples by the updates between the weights of their first and their last token.
    """

    ranks: int
    servers: int
    steps_per_hour: float
    train_idle: float
    generate_idle: float
    sync: float
    staleness: dict[int, int]
    spans: dict[int, int]


@dataclass(eq=False)
class _Prompt:
    open_samples: int
    oldest: int | None = None  # version of the oldest token
    samples: list["_Sample"] = field(default_factory=list)


@dataclass(eq=False)
class _Sample:
    prompt: _Prompt
    turns: list[float]  # tokens still to generate, by turn
    pauses: list[float]  # seconds between them
    context: float  # tokens before the next one
    new_context: float  # of them, those that a cache of the present weights does not have
    cached_for: int = -1  # version of the weights whose cache a server holds
    first: int | None = None
    last: int | None = None


class _Server:
    """Sequences that share the tokens per second of one engine; `_Sample`s wait where it is full."""

    def __init__(self, number: int, rates: Rates, concurrency: int) -> None:
        self.number, self.rates, self.concurrency = number, rates, concurrency
        self.waiting: deque[_Sample] = deque()
        self.clock = {"prefill": 0.0, "decode": 0.0}  # tokens that each sequence of the phase has had
        self.ends: dict[str, list[tuple[float, int, _Sample]]] = {"prefill": [], "decode": []}
        self.now = self.busy_s = 0.0
        self.order, self.changes = itertools.count(), 0

    @property
    def running(self) -> int:
        return sum(map(len, self.ends.values()))

    def _speed(self, phase: str) -> float:
        table = self.rates.prefill if phase == "prefill" else self.rates.decode
        return at_concurrency(table, self.running) / self.running

    def advance(self, now: float) -> None:
        if self.running:
            for phase in self.clock:
                if self.ends[phase]:  # an infinite speed of prefills leaves no time in their phase
                    self.clock[phase] += self._speed(phase) * (now - self.now) if now > self.now else 0.0
            self.busy_s += now - self.now
        self.now = now

    def enter(self, phase: str, sample: _Sample, tokens: float) -> None:
        heapq.heappush(self.ends[phase], (self.clock[phase] + tokens, next(self.order), sample))
        self.changes += 1

    def next_end(self) -> tuple[float, str] | None:
        """(time, phase) at which the next sequence ends its phase, if nothing changes before."""
        ends = []
        for phase, queue in self.ends.items():
            if queue:
                left = max(0.0, queue[0][0] - self.clock[phase])
                ends.append((self.now + left / self._speed(phase), phase))
        return min(ends, default=None)

    def leave(self, phase: str) -> _Sample:
        self.changes += 1
        end, _, sample = heapq.heappop(self.ends[phase])
        self.clock[phase] = max(self.clock[phase], end)
        return sample

    def interrupt(self) -> list[_Sample]:
        """Every running sequence with the tokens that it still needs, in the order of their starts."""
        left = sorted((entry[1], entry, phase) for phase, queue in self.ends.items() for entry in queue)
        for _, (end, _, sample), phase in left:
            if phase == "decode":
                remaining = max(0.0, end - self.clock["decode"])
                sample.context += sample.turns[0] - remaining
                sample.turns[0] = remaining
        self.ends = {"prefill": [], "decode": []}
        self.changes += 1
        return [entry[2] for _, entry, _ in left]


class _Run:
    """State of one simulated run; `version` counts updates, as of the last weight sync."""

    def __init__(
        self, rates: Rates, workload: Workload, schedule: Schedule, ranks: int, servers: int, seed: int
    ) -> None:
        self.rates, self.workload, self.schedule, self.ranks, self.seed = rates, workload, schedule, ranks, seed
        self.servers = [_Server(i, rates, schedule.concurrency) for i in range(servers)]
        self.events: list[tuple[float, int, str, object]] = []
        self.order = itertools.count()
        self.now = 0.0
        self.version = self.updates = self.started = self.tool_calls = 0
        self.budget = schedule.prompts_allowed(workload.prompts)
        self.unfinished: set[_Prompt] = set()
        self.finished: list[_Prompt] = []  # in the order of their ends
        self.stopped: list[_Sample] = []  # interrupted ones, and those whose tool answered during a sync
        self.state, self.since = "idle", 0.0  # of the trainer: idle, train, drain (waits for running samples), sync
        self.seconds = Counter()
        self.measured_from, self.busy_before = 0.0, 0.0
        self.staleness, self.spans = Counter(), Counter()

    def until(self, updates: int) -> Outcome:
        """Simulate so many updates after the first sync."""
        last = updates + self.schedule.sync_step
        while self.updates < last or self.state != "idle":
            self._start_prompts()
            self._train_or_sync()
            self.now, _, kind, what = heapq.heappop(self.events)
            if kind == "server":
                number, changes = what
                if changes == self.servers[number].changes:
                    self._end_phase(self.servers[number])
            elif kind == "tool":
                self.tool_calls -= 1
                self._place(what)
            elif kind == "updated":
                self.updates += 1
                self._become("idle" if self.updates % self.schedule.sync_step else "drain")
            elif kind == "synced":
                self._end_sync()
        self._become("idle")
        return self._outcome(updates)

    def _later(self, seconds: float, kind: str, what: object = None) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), kind, what))

    def _become(self, state: str) -> None:
        self.seconds[self.state] += self.now - self.since
        self.state, self.since = state, self.now

    def _watch(self, server: _Server) -> None:
        if end := server.next_end():
            self._later(end[0] - self.now, "server", (server.number, server.changes))

    def _draw(self) -> Iterator[_Sample]:
        """The samples of the next prompt."""
        rng, work = np.random.default_rng((self.seed, self.started)), self.workload
        prompt = _Prompt(work.n)
        self.started += 1
        self.unfinished.add(prompt)
        lengths = work.response.draw(rng, work.n)
        pauses = work.tool_s.draw(rng, work.n * (work.turns - 1)).reshape(work.n, -1)
        for length, of_sample in zip(lengths, pauses, strict=True):
            turns, tokens = [float(length) / work.turns] * work.turns, float(work.prompt_tokens)
            prompt.samples.append(_Sample(prompt, turns, of_sample.tolist(), tokens, tokens))
        yield from prompt.samples

    def _start_prompts(self) -> None:
        """Start what the budget permits and the servers have room for."""
        if self.state in ("drain", "sync"):
            return
        room = len(self.servers) * self.schedule.concurrency - self.tool_calls
        room -= sum(server.running + len(server.waiting) for server in self.servers)
        while self.budget > 0 and room > 0:
            self.budget -= 1
            room -= self.workload.n
            for sample in self._draw():
                self._place(sample)

    def _place(self, sample: _Sample) -> None:
        """On the server with the fewest sequences; after the sync where one is going on."""
        if self.state == "sync":
            self.stopped.append(sample)
            return
        server = min(self.servers, key=lambda s: s.running + len(s.waiting))
        server.waiting.append(sample)
        self._fill(server)

    def _fill(self, server: _Server) -> None:
        server.advance(self.now)
        while server.waiting and server.running < server.concurrency:
            sample = server.waiting.popleft()
            tokens = sample.new_context if sample.cached_for == self.version else sample.context
            server.enter("prefill", sample, tokens)
        self._watch(server)

    def _end_phase(self, server: _Server) -> None:
        _, phase = server.next_end()
        server.advance(self.now)
        sample = server.leave(phase)
        if phase == "prefill":
            sample.cached_for, sample.new_context = self.version, 0.0
            sample.first = self.version if sample.first is None else sample.first
            sample.last = self.version
            oldest = sample.prompt.oldest
            sample.prompt.oldest = sample.first if oldest is None else min(oldest, sample.first)
            server.enter("decode", sample, sample.turns[0])
        else:
            sample.context += sample.turns.pop(0)
            if sample.turns:
                sample.context += self.workload.tool_tokens
                sample.new_context = self.workload.tool_tokens
                self.tool_calls += 1
                self._later(sample.pauses.pop(0), "tool", sample)
            else:
                self._finish(sample.prompt)
        self._fill(server)

    def _finish(self, prompt: _Prompt) -> None:
        prompt.open_samples -= 1
        if prompt.open_samples == 0:
            self.unfinished.remove(prompt)
            self.finished.append(prompt)

    def _train_or_sync(self) -> None:
        if self.state == "drain" and (self.schedule.partial_rollout or not self.unfinished):
            self._become("sync")
            for server in self.servers:
                server.advance(self.now)
                self.stopped += [*server.interrupt(), *server.waiting]
                server.waiting.clear()
            self._later(self.rates.sync_s, "synced")
        elif self.state == "idle" and (batch := self._batch()):
            for prompt in batch:
                for sample in prompt.samples:
                    self.staleness[self.updates - sample.first] += 1
                    self.spans[sample.last - sample.first] += 1
            trained = set(batch)
            self.finished = [prompt for prompt in self.finished if prompt not in trained]
            self._become("train")
            self._later(self.rates.seconds_of_update(self.ranks), "updated")

    def _end_sync(self) -> None:
        self._become("idle")
        if self.version == 0:  # what follows is measured
            self.seconds.clear()
            self.staleness.clear()
            self.spans.clear()
            self.measured_from, self.busy_before = self.now, sum(server.busy_s for server in self.servers)
        self.version = self.updates
        left = len(self.unfinished) + len(self.finished)
        self.budget = self.schedule.prompts_allowed(self.workload.prompts) - left
        stopped, self.stopped = self.stopped, []
        for server in self.servers:
            server.advance(self.now)
        for sample in stopped:
            self._place(sample)

    def _batch(self) -> list[_Prompt]:
        """The oldest finished prompts, or none: too few, or ones that must be trained now have not finished yet.

        A prompt's deadline is the last update that may train it. Of the prompts with a deadline up to any later update,
        no more may stay than the updates until then have room for.
        """
        size, allowed = self.workload.prompts, self.schedule.updates_allowed
        if len(self.finished) < size:
            return []
        batch = sorted(self.finished, key=lambda prompt: prompt.oldest)[:size]
        versions = Counter(prompt.oldest for prompt in (*self.finished, *self.unfinished) if prompt.oldest is not None)
        taken = Counter(prompt.oldest for prompt in batch)
        stay = 0
        for version in sorted(versions):
            stay += versions[version] - taken[version]
            if stay > size * max(0, version + allowed - self.updates):
                return []
        return batch

    def _outcome(self, updates: int) -> Outcome:
        seconds = self.now - self.measured_from
        for server in self.servers:
            server.advance(self.now)
        busy = sum(server.busy_s for server in self.servers) - self.busy_before
        sync = self.seconds["sync"] / seconds
        return Outcome(
            ranks=self.ranks, servers=len(self.servers), steps_per_hour=3600 * updates / seconds,
            train_idle=(self.seconds["idle"] + self.seconds["drain"]) / seconds,
            generate_idle=max(0.0, 1 - sync - busy / len(self.servers) / seconds), sync=sync,
            staleness=dict(sorted(self.staleness.items())), spans=dict(sorted(self.spans.items())),
        )  # fmt: skip


def simulate(
    rates: Rates, workload: Workload, schedule: Schedule, ranks: int, servers: int, updates: int = 40, seed: int = 0
) -> Outcome:
    """A run on `ranks` that train and `servers` that generate; `updates` are those after its first sync."""
    return _Run(rates, workload, schedule, ranks, servers, seed).until(updates)
