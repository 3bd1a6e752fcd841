"""The report page: what it reads, what it shows, that it needs no network."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from verl.report.asynchronous import async_panels, idle_cards
from verl.report.metric_names import all_metrics, left_out
from verl.report.page import collect_series, summary_cards, write_report
from verl.utils.jsonl import read_objects

ROOT = Path(__file__).resolve().parents[2]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _run_dir(tmp_path):
    same = {"spd/scenario/A": 0.5, "spd/scenario/B": 0.1, "timing_s/gen": 1.0, "timing_s/step": 2.0,
            "training/dropped_samples": 1}
    rows = [{"step": i, "data": {"critic/score/mean": i / 10, **same, "actor/odd": float(i % 7),
                                 "reward/again": float(i % 7)}} for i in range(1, 41)]
    write_rows(tmp_path / "metrics.jsonl", rows)
    sample = {
        "step": 40, "kind": "best", "prompt": "how many <b>apples</b> ?", "response": None, "score": 1.25,
        "extras": {"L": 3.0, "scenario_A": 0.0, "scenario_B": 1.0, "score": 1.25},
        "segments": [{"text": "five", "kind": "match"}, {"text": "pears", "kind": "rejected"}],
    }
    write_rows(tmp_path / "samples.jsonl", [sample])
    (tmp_path / "run_config.yaml").write_text("trainer:\n  nnodes: 1\n")
    (tmp_path / "versions.json").write_text('{"torch": "2.13.0"}')
    return tmp_path


def test_shares_above_a_tenth_of_what_a_run_left_out():
    """Sums of counts, means of shares, the last of running counts; the row of a step that ran again replaces it."""
    steps = [
        {"training/dropped_samples": 9, "training/requested_samples": 10, "health/truncated": 0.2,
         "fully_async/count/dropped_stale_samples": 1, "fully_async/count/total_generated_samples": 3},
        {"training/dropped_samples": 0, "training/requested_samples": 10, "health/truncated": 0.0,
         "actor/nonfinite_steps": 4, "fully_async/count/dropped_stale_samples": 3,
         "fully_async/count/total_generated_samples": 5},
        {"training/dropped_samples": 4, "training/requested_samples": 20, "health/truncated": 0.1,
         "actor/nonfinite_steps": 0},
    ]  # fmt: skip
    rows = [{"step": n, "data": data} for n, data in ((1, steps[0]), (1, steps[1]), (2, steps[2]))]
    shares = {metric: share for metric, share, _ in left_out(rows)}
    assert shares == {
        "training/dropped_samples": pytest.approx(4 / 30), "actor/nonfinite_steps": 0.5,
        "fully_async/count/dropped_stale_samples": pytest.approx(3 / 8),
    }  # fmt: skip
    assert left_out([{"step": 1, "data": {"health/truncated": 0.1}}]) == []
    assert all(name in all_metrics() for name in shares)


def test_page_shows_curves_samples_config_and_versions_without_the_network(tmp_path):
    page = write_report(_run_dir(tmp_path)).read_text()
    assert page.count("<svg") == 4  # reward, scenarios, timings; below: actor/odd
    assert "<td>training/dropped_samples</td><td>1 at every step</td>" in page
    assert "<td>reward/again</td><td>equal to actor/odd</td>" in page
    for text in ("Scenario shares", "Seconds per phase", "actor/odd", "nnodes: 1", "2.13.0", "tok rejected", "pears"):
        assert text in page
    assert "· L 3 · scenario B</header>" in page  # the score stands before them
    assert "how many &lt;b&gt;apples" in page  # text of a model never becomes markup
    assert not re.search(r"""(src|href)=["'](https?:)?//""", page)


def test_page_lists_starts_with_command_steps_and_end(tmp_path):
    rows = [
        {"start": 1, "step": 0, "total_steps": 60, "command": "python -m x a=1", "config": "1.yaml",
         "time": "2026-01-01T10:00:00"},
        {"start": 2, "step": 20, "total_steps": 60, "command": "python -m x a=<2>", "config": "2.yaml", "time": "2"},
        {"start": 2, "step": 30, "ended": "stopped", "time": "2026-01-01T11:00:00"},
        {"start": 3, "step": 30, "total_steps": 60, "command": "python -m x", "config": "3.yaml", "time": "4"},
    ]  # fmt: skip
    write_rows(_run_dir(tmp_path) / "starts.jsonl", rows)
    page = write_report(tmp_path).read_text()
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page.partition("<h2>Starts</h2>")[2].partition("</table>")[0])
    assert cells == [
        "2026-01-01 10:00:00", "0 of 60", "python -m x a=1", "killed",
        "2", "20 of 60", "python -m x a=&lt;2&gt;", "2026-01-01 11:00:00, stopped after step 30",
        "4", "30 of 60", "python -m x", "running, or killed",
    ]  # fmt: skip
    assert "<b>40 of 60</b><span>steps, finished of planned" in page


def test_cards_give_first_and_last_tenth_and_sums(tmp_path):
    rows = [row for _, row in read_objects(_run_dir(tmp_path) / "metrics.jsonl")]
    cards = dict(summary_cards(collect_series(rows), 40))
    assert cards["reward, first and last tenth"] == "0.25 → 3.85"  # means of 0.1..0.4 and of 3.7..4.0
    assert cards["seconds in steps"] == "80"
    assert cards["dropped samples"] == "40"


def test_page_of_a_text_run_has_no_legend_of_drafts_and_one_of_sft_shows_its_losses(tmp_path):
    _run_dir(tmp_path)
    sample = {"step": 3, "kind": "best", "prompt": "p", "response": "r", "score": 1.0, "extras": {}, "segments": None}
    write_rows(tmp_path / "samples.jsonl", [sample])
    page = write_report(tmp_path).read_text()
    assert "<div class=\"response\">r</div>" in page and "Draft tokens" not in page
    rows = [{"step": i, "data": {"train/loss": 4.0 / i, "train/lr": 1e-5, "val/loss": 3.0 / i}} for i in range(1, 11)]
    torn = "\n".join(map(json.dumps, rows)) + '\n{"step": 11, "da'  # the run is still writing
    sft = tmp_path / "sft"
    sft.mkdir()
    (sft / "metrics.jsonl").write_text(torn)
    page = write_report(sft).read_text()
    assert "<span>loss, first and last step" in page and "4 → 0.4" in page and page.count("<svg") == 3


@pytest.mark.process
def test_the_command_makes_the_page_of_a_running_run_and_names_a_folder_without_one(tmp_path):
    run = _run_dir(tmp_path)
    with open(run / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 41, "data": {"critic/score/m')  # the writer is in the middle of a row
    command = [sys.executable, "-m", "verl.report"]
    made = subprocess.run([*command, str(run)], capture_output=True, text=True, cwd=ROOT)
    assert made.returncode == 0 and made.stdout.strip() == str(run / "report.html"), made.stderr
    assert ">40<" in (run / "report.html").read_text()
    refused = subprocess.run([*command, str(run / "none")], capture_output=True, text=True, cwd=ROOT)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1 and "holds no metrics.jsonl" in refused.stderr
    (run / "report.html.tmp").mkdir()
    refused = subprocess.run([*command, str(run)], capture_output=True, text=True, cwd=ROOT)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1 and "report.html.tmp" in refused.stderr


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
