"""The report page: what it reads, what it shows, that it needs no network."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from verl.report.metric_names import all_metrics, left_out
from verl.report.page import collect_series, summary_cards, write_report
from verl.report.plots import smooth
from verl.utils.jsonl import read_objects

ROOT = Path(__file__).resolve().parents[2]


def _run_dir(tmp_path):
    rows = [
        {
            "step": i,
            "data": {
                "critic/score/mean": i / 10,
                "spd/scenario/A": 0.5,
                "spd/scenario/B": 0.1,
                "timing_s/gen": 1.0,
                "timing_s/step": 2.0,
                "training/dropped_samples": 1,
                "actor/odd": float(i % 7),
                "reward/again": float(i % 7),
            },
        }
        for i in range(1, 41)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    sample = {
        "step": 40,
        "kind": "best",
        "prompt": "how many <b>apples</b> ?",
        "response": None,
        "score": 1.25,
        "extras": {"L": 3.0, "scenario_A": 0.0, "scenario_B": 1.0, "score": 1.25},
        "segments": [{"text": "five", "kind": "match"}, {"text": "pears", "kind": "rejected"}],
    }
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
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


def test_a_run_shows_mismatch_throughput_and_memory_first(tmp_path):
    kl = [0.004, 0.002, 0.003]
    rows = [{"step": i, "data": {
        "rollout_corr/kl": value, "rollout_corr/k3_kl": value / 2, "rollout_corr/rollout_ppl": 2.0 + value,
        "training/rollout_actor_probs_pearson_corr": 1 - value, "perf/throughput": 100.0 * i,
        "perf/max_memory_resident_gb": 2.0 + i,
    }} for i, value in enumerate(kl, 1)]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    page = write_report(tmp_path).read_text()
    first, _, rest = page.partition("<details>")
    titles = re.findall(r"<figcaption><b>(.*?)</b>", first)
    assert titles == ["Rollout against trainer", "Correlation of rollout and trainer", "Throughput", "Memory"]
    assert ">k3_kl<" in first and "rollout_corr/rollout_ppl" in rest and "rollout_corr/kl" not in rest
    assert "<b>0.004 → 0.003</b><span>KL of rollout and trainer" in first and "<b>100 → 300</b>" in first


def test_page_lists_starts_with_command_steps_and_end(tmp_path):
    rows = [
        {"start": 1, "step": 0, "total_steps": 60, "command": "python -m x a=1", "config": "1.yaml",
         "time": "2026-01-01T10:00:00"},
        {"start": 2, "step": 20, "total_steps": 60, "command": "python -m x a=<2>", "config": "2.yaml", "time": "2"},
        {"start": 2, "step": 30, "ended": "stopped", "time": "2026-01-01T11:00:00"},
        {"start": 3, "step": 30, "total_steps": 60, "command": "python -m x", "config": "3.yaml", "time": "4"},
    ]  # fmt: skip
    (_run_dir(tmp_path) / "starts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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


def test_step_logged_twice_keeps_the_last_value():
    series = collect_series([{"step": 3, "data": {"a": 1.0}}, {"step": 3, "data": {"a": 2.0, "text": "x"}}])
    assert (series["a"].steps, series["a"].values) == ([3], [2.0])
    assert set(series) == {"a"}


def test_smooth_leaves_nan_out():
    assert smooth([1.0, math.nan, 4.0], 2) == [1.0, 2.5, 4.0]


def test_page_of_a_text_run_has_no_legend_of_drafts_and_one_of_sft_shows_its_losses(tmp_path):
    _run_dir(tmp_path)
    sample = {"step": 3, "kind": "best", "prompt": "p", "response": "r", "score": 1.0, "extras": {}, "segments": None}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    page = write_report(tmp_path).read_text()
    assert "<div class=\"response\">r</div>" in page and "Draft tokens" not in page
    rows = [{"step": i, "data": {"train/loss": 4.0 / i, "train/lr": 1e-5, "val/loss": 3.0 / i}} for i in range(1, 11)]
    torn = "\n".join(map(json.dumps, rows)) + '\n{"step": 11, "da'  # the run is still writing
    sft = tmp_path / "sft"
    sft.mkdir()
    (sft / "metrics.jsonl").write_text(torn)
    page = write_report(sft).read_text()
    assert "<span>loss, first and last tenth" in page and "4 → 0.4" in page and page.count("<svg") == 3


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
