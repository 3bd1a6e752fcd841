"""The journal of samples' states and the timeline."""

import itertools
import json

import pytest

from tests.helpers.rl_run import read_rows as rows
from verl.trainer.fully_async import journal
from verl.trainer.fully_async.journal import Journal, JournalError, Timeline

PATH = ("drawn", "running", "interrupted", "running", "finished", "graded", "queued", "trained")


@pytest.fixture
def book(tmp_path):
    opened = Journal()
    opened.open(tmp_path / "journal.jsonl")
    yield opened
    opened.close()


def test_every_change_is_a_row_and_the_counts_add_up(book, tmp_path):
    for number, states in enumerate((PATH, PATH[:2], (*PATH[:6], "dropped_stale"), (*PATH[:2], "dropped_failed"))):
        for state in states:
            book.record(f"{number}/0", state, version=7)
    written = rows(tmp_path / "journal.jsonl")
    assert [row["state"] for row in written if row["sample"] == "0/0"] == list(PATH)
    assert {row["version"] for row in written} == {7} and all(row["time"] > 1e9 for row in written)
    assert {state: count for state, count in book.counts.items() if count} == {
        "trained": 1, "running": 1, "dropped_stale": 1, "dropped_failed": 1,
    }  # fmt: skip
    assert book.drawn == 4 and book.states == {"1/0": "running"}
    book.check()
    book.counts["running"] = 0
    with pytest.raises(JournalError, match="4 samples were drawn, but the counts are"):
        book.check()


def test_a_state_that_was_left_out_is_refused(book):
    book.record("2/0", "drawn")
    with pytest.raises(JournalError, match="cannot become trained"):
        book.record("2/0", "trained")


@pytest.mark.parametrize("end", ["trained", "dropped_stale", "dropped_failed"])
def test_nothing_follows_an_end(book, end):
    for state in (*PATH[:7], end):
        book.record("0/0", state)
    book.record("1/0", "drawn")
    for state in journal.TRANSITIONS:
        if state is not None:
            with pytest.raises(JournalError, match="0/0 is not known or was trained or dropped before"):
                book.record("0/0", state)
    assert end in journal.ENDS


def test_a_resumed_journal_forgets_what_came_after_the_checkpoint(book, tmp_path):
    for number, states in enumerate((PATH, PATH[:2], PATH[:1])):
        for state in states:
            book.record(f"{number}/0", state)
    saved = json.loads(json.dumps(book.state()))
    for state in PATH[2:]:
        book.record("1/0", state)
    book.file._file.write('{"time": 1')  # the process is killed within a row
    book.close()

    resumed = Journal()
    resumed.open(tmp_path / "journal.jsonl", saved, step=3)
    *kept, event = rows(tmp_path / "journal.jsonl")
    assert event["event"] == "resume" and event["step"] == 3 and event["removed"] == 7
    assert len(kept) == 11 and resumed.states == {"1/0": "running", "2/0": "drawn"}
    resumed.check()
    for sample, states in (("1/0", PATH[2:]), ("2/0", PATH[1:])):
        for state in states:
            resumed.record(sample, state)
    assert resumed.counts["trained"] == 3
    resumed.close()


def test_a_checkpoint_of_another_run_continues_in_a_file_of_its_own(book, tmp_path):
    for state in PATH[:2]:
        book.record("0/0", state)
    resumed = Journal()
    resumed.open(tmp_path / "new.jsonl", book.state(), step=3)
    for state in PATH[2:]:
        resumed.record("0/0", state)
    saved = resumed.state()
    assert saved["rows"] == len(rows(tmp_path / "new.jsonl")) == 1 + len(PATH[2:])  # the first one is the resume
    Journal().open(tmp_path / "new.jsonl", saved, step=4)


def test_a_new_run_keeps_the_file_of_an_earlier_one(book, tmp_path):
    book.record("0/0", "drawn")
    book.close()
    fresh = Journal()
    fresh.open(tmp_path / "journal.jsonl")
    assert rows(tmp_path / "journal.jsonl") == [] and len(rows(tmp_path / "journal.1.jsonl")) == 1
    fresh.close()


def test_spans_of_the_timeline_follow_each_other(tmp_path, monkeypatch):
    times = itertools.count(100)
    monkeypatch.setattr("verl.trainer.fully_async.journal.time.time", lambda: next(times))
    timeline = Timeline()
    timeline.file.open(tmp_path / "timeline.jsonl", None)
    timeline.enter("trainer", "idle", 0)
    timeline.enter("server_0", "generate", 0)
    timeline.enter("trainer", "train", 0)
    assert timeline.take_seconds() == {("trainer", "idle"): 2, ("trainer", "train"): 1, ("server_0", "generate"): 2}
    timeline.close()
    spans = rows(tmp_path / "timeline.jsonl")
    assert spans[0] == {"who": "trainer", "what": "idle", "start": 100, "end": 102, "version": 0}
    assert [(s["who"], s["start"], s["end"]) for s in spans[1:]] == [
        ("server_0", 101, 103), ("trainer", 102, 103), ("server_0", 103, 104), ("trainer", 103, 105),
    ]  # fmt: skip
