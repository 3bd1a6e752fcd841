"""The states of samples, and the files that record them: async_journal.jsonl and async_timeline.jsonl of a run."""

import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from loguru import logger

from verl.utils.jsonl import replace_text, set_aside

JOURNAL_FILE, TIMELINE_FILE = "async_journal.jsonl", "async_timeline.jsonl"
DRAWN, RUNNING, INTERRUPTED, FINISHED, GRADED, QUEUED = (
    "drawn", "running", "interrupted", "finished", "graded", "queued",
)  # fmt: skip
TRAINED, STALE, FAILED = "trained", "dropped_stale", "dropped_failed"
#: state -> states that may follow; None before the first one
TRANSITIONS: dict[str | None, frozenset[str]] = {
    None: frozenset({DRAWN}),
    DRAWN: frozenset({RUNNING, STALE, FAILED}),
    RUNNING: frozenset({INTERRUPTED, FINISHED, STALE, FAILED}),
    INTERRUPTED: frozenset({RUNNING, STALE, FAILED}),
    FINISHED: frozenset({GRADED, STALE, FAILED}),
    GRADED: frozenset({QUEUED, STALE, FAILED}),
    QUEUED: frozenset({TRAINED, STALE, FAILED, FINISHED}),
    TRAINED: frozenset(), STALE: frozenset(), FAILED: frozenset(),
}  # fmt: skip
ENDS = frozenset(state for state, after in TRANSITIONS.items() if not after)


class JournalError(RuntimeError):
    """A change of state that TRANSITIONS does not have, or counts that do not add up."""


class RowsFile:
    """A jsonl file that counts its rows, so that it can be cut to the rows that a checkpoint knows."""

    def __init__(self) -> None:
        self.rows, self._file = 0, None

    def open(self, path: Path, rows: int | None) -> int:
        """Continue the file after its first `rows` rows, or (None) begin a new one; how many rows were removed."""
        self.rows = removed = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        if rows is None:
            if kept := set_aside(path):
                logger.info("{} of an earlier run is kept as {}", path, kept.name)
        elif path.exists():  # else the checkpoint is of another run
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            if len(lines) < rows:
                raise JournalError(
                    f"{path} has {len(lines)} rows, but the checkpoint was written after {rows}. Restore the file, or "
                    "delete it to continue with a new one."
                )
            self.rows, removed = rows, len(lines) - rows
            replace_text(path, "".join(lines[:rows]))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        return removed

    def append(self, row: dict[str, Any]) -> None:
        """Write a row at once."""
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        self.rows += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Journal:
    """The state of each sample that is neither trained nor dropped, and counts of all.

    Each change is a row {time, sample, state, version, ...} of async_journal.jsonl: `time` in seconds since 1970,
    `sample` is "<number of the prompt>/<number among its samples>", `version` the weights version of the servers, of
    a trained sample that of its oldest token. Rows of state interrupted and finished have `tokens`, those of trained
    samples `step`, and of dropped ones `reason`. A queued sample whose reward function failed is graded again after a
    resume: it becomes finished. Row {time, event: resume, step, removed} says that a run continued
    after `step`, and how many rows of later steps were removed.

    Prompts are drawn in the order of their numbers, so that one whose samples have ended is not drawn again.
    """

    def __init__(self) -> None:
        self.file = RowsFile()
        self.states: dict[str, str] = {}
        self.counts: Counter[str] = Counter()  # samples by state
        self.drawn = 0
        self._last_number = -1
        self._lock = threading.Lock()

    def open(self, path: Path, saved: dict[str, Any] | None = None, step: int = 0) -> None:
        """Begin a file, or continue that of a checkpoint of `step` (`saved` is what `state` returned)."""
        removed = self.file.open(path, None if saved is None else saved["rows"])
        if saved is not None:
            self.states, self.drawn = dict(saved["states"]), saved["drawn"]
            self.counts, self._last_number = Counter(saved["counts"]), saved["last_number"]
            self.file.append({"time": time.time(), "event": "resume", "step": step, "removed": removed})
            self.check()

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to know, as JSON."""
        with self._lock:
            return {
                "rows": self.file.rows, "states": dict(self.states), "drawn": self.drawn,
                "counts": dict(self.counts), "last_number": self._last_number,
            }  # fmt: skip

    def record(self, sample: str, state: str, version: int | None = None, **more: Any) -> None:
        """Enter a change of state. JournalError if the sample cannot change to it, as after it was trained."""
        with self._lock:
            before = self.states.get(sample)
            number = int(sample.partition("/")[0])
            if state not in TRANSITIONS[before] or (before is None and number < self._last_number):
                what = "is not known or was trained or dropped before" if before is None else f"is {before}"
                raise JournalError(f"sample {sample} {what} and cannot become {state}")
            if before is None:
                self.drawn, self._last_number = self.drawn + 1, max(number, self._last_number)
            else:
                self.counts[before] -= 1
            self.counts[state] += 1
            if state in ENDS:
                self.states.pop(sample, None)
            else:
                self.states[sample] = state
            self.file.append({"time": time.time(), "sample": sample, "state": state, "version": version, **more})

    def check(self) -> None:
        """JournalError unless every drawn sample is in one state."""
        with self._lock:
            if self.drawn != sum(self.counts.values()) or min(self.counts.values(), default=0) < 0:
                raise JournalError(f"{self.drawn} samples were drawn, but the counts are {dict(self.counts)}")

    def close(self) -> None:
        self.file.close()


class Timeline:
    """Spans {who, what, start, end, version} of async_timeline.jsonl, times in seconds since 1970.

    `who` is trainer or server_<i>, `what` is train, generate, sync or idle, `version` that of the weights in use.
    """

    def __init__(self) -> None:
        self.file = RowsFile()
        self.seconds: Counter[tuple[str, str]] = Counter()  # by (who, what), since `take_seconds`
        self._since: dict[str, tuple[str, float, int]] = {}
        self._lock = threading.Lock()

    def enter(self, who: str, what: str, version: int) -> None:
        """`who` begins to do `what`, and ends what it did."""
        now = time.time()
        with self._lock:
            self._end(who, now)
            self._since[who] = (what, now, version)

    def _end(self, who: str, now: float) -> None:
        if who in self._since:
            what, start, version = self._since.pop(who)
            self.seconds[who, what] += now - start
            self.file.append({"who": who, "what": what, "start": start, "end": now, "version": version})

    def take_seconds(self) -> Counter[tuple[str, str]]:
        """Seconds by (who, what) since the last call, spans that still run included."""
        now = time.time()
        with self._lock:
            for who, (what, _, version) in list(self._since.items()):
                self._end(who, now)
                self._since[who] = (what, now, version)
            taken, self.seconds = self.seconds, Counter()
        return taken

    def close(self) -> None:
        with self._lock:
            for who in list(self._since):
                self._end(who, time.time())
            self.file.close()
