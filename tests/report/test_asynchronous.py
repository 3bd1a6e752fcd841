"""Timeline and histograms of an asynchronous run, from its two files; a synchronous run has none of them."""

import json
import re

import pytest

from verl.report.asynchronous import async_panels, idle_cards, sample_counts
from verl.report.page import write_report


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def timeline_rows(steps, servers=2, start=1.7e9):
    """Steps of 1 s idle, 4 s of training in two rows, and a sync of 0.5 s; servers generate, one of them idles."""
    rows, now = [], start
    for step in range(1, steps + 1):
        for what, seconds in (("idle", 1.0), ("train", 0.1), ("train", 3.9), ("sync", 0.5)):
            rows.append({"who": "trainer", "what": what, "start": now, "end": now + seconds, "version": step - 1})
            now += seconds
        for server in range(servers):
            begun = now - 5.5
            for what, seconds in (("generate", 5.0 - 2 * server), ("idle", 2.0 * server), ("sync", 0.5)):
                row = {"who": f"server_{server}", "what": what, "start": begun, "end": begun + seconds}
                rows.append(row | {"version": step - 1})
                begun += seconds
    return rows


def journal_rows(steps, samples=4):
    """Every sample is drawn at version step - 2 and trained at `step`; the first one is interrupted once."""
    rows = [{"time": 0.0, "event": "resume", "step": 0, "removed": 0}]
    for step in range(1, steps + 1):
        for k in range(samples):
            again = ["interrupted", "running"] if k == 0 else []
            states = ["drawn", "running", *again, "finished", "graded", "queued"]
            oldest = max(0, step - 2)
            rows += [{"time": 0.0, "sample": f"{step}/{k}", "state": state, "version": oldest} for state in states]
            rows.append({"time": 0.0, "sample": f"{step}/{k}", "state": "trained", "version": oldest, "step": step})
    return rows


def asynchronous_run(folder, steps=20):
    metrics = [{"step": i, "data": {"critic/score/mean": i / steps}} for i in range(1, steps + 1)]
    write_rows(folder / "metrics.jsonl", metrics)
    write_rows(folder / "async_timeline.jsonl", timeline_rows(steps))
    write_rows(folder / "async_journal.jsonl", journal_rows(steps))
    return folder


def test_samples_are_counted_by_age_and_by_interruptions():
    ages, interruptions = sample_counts(journal_rows(5))
    assert ages == {0: 4, 1: 16} and interruptions == {0: 15, 1: 5}


def test_idle_shares_are_those_of_the_timeline(tmp_path):
    cards = dict(idle_cards(asynchronous_run(tmp_path)))
    assert cards == {"trainer idle": "18%", "servers idle": "18%"}  # 1 of 5.5 s, and 2 of 2 x 5.5 s


def test_the_page_shows_timeline_and_histograms(tmp_path):
    page = write_report(asynchronous_run(tmp_path)).read_text()
    part = page.partition("<h2>Asynchronous training</h2>")[2].partition("<h2>Curves</h2>")[0]
    assert re.findall(r"<figcaption><b>(.*?)</b>", part) == ["Timeline", "Staleness", "Partial generations"]
    assert part.count("<svg") == 3 and "the last 12 weight syncs" in part
    timeline = part.partition("<svg")[2].partition("</svg>")[0]
    assert all(f">{name}<" in timeline for name in ("trainer", "server 0", "server 1", "generate", "sync", "idle"))
    assert ">20</text>" in timeline and ">7</text>" not in timeline  # 12 syncs: steps 9 to 20
    assert "<b>18%</b><span>trainer idle" in page


@pytest.mark.parametrize("missing", ["async_timeline.jsonl", "async_journal.jsonl"])
def test_what_has_no_file_is_not_shown(tmp_path, missing):
    (asynchronous_run(tmp_path) / missing).unlink()
    wide, narrow = async_panels(tmp_path)
    assert (len(wide), len(narrow)) == ((0, 2) if missing.startswith("async_t") else (1, 0))
    (tmp_path / "async_timeline.jsonl").unlink(missing_ok=True)
    (tmp_path / "async_journal.jsonl").unlink(missing_ok=True)
    page = write_report(tmp_path).read_text()
    assert "Asynchronous" not in page and "idle" not in page


def test_a_run_that_is_still_writing_is_shown(tmp_path):
    asynchronous_run(tmp_path, steps=2)
    for name in ("async_timeline.jsonl", "async_journal.jsonl"):
        with open(tmp_path / name, "a") as file:
            file.write('{"who": "trai')
    page = write_report(tmp_path).read_text()
    assert "the run; the numbers" in page and page.count("Partial generations") == 1
