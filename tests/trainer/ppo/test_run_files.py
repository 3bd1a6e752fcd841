"""Files of a run: rows after the resumed step are cut, samples are chosen, torn lines are survived."""

import json

import numpy as np
import pytest

from verl.trainer.run.run_files import AppendedRows, RunFiles, installed_versions, pick_samples, write_jsonl


def steps_in(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_rows_behind_the_resumed_step_and_a_torn_last_line_are_cut(tmp_path):
    rows = AppendedRows(tmp_path / "m.jsonl")
    rows.append([{"step": s} for s in (0, 1, 2, 3)])
    with open(rows.path, "a") as f:
        f.write('{"step": 1, "x')
    rows.cut_after(2)
    assert steps_in(rows.path) == [0, 1, 2]
    rows.append([{"step": 3}])
    assert steps_in(rows.path) == [0, 1, 2, 3]


def test_broken_inner_line_is_named(tmp_path):
    rows = AppendedRows(tmp_path / "m.jsonl")
    rows.path.write_text('{"st\n{"step": 1}\n')
    with pytest.raises(ValueError, match="m.jsonl, line 1: not JSON"):
        rows.cut_after(1)


def test_fresh_run_in_an_old_folder_begins_anew(tmp_path):
    files = RunFiles(str(tmp_path), total_steps=10, with_report=False)
    files.open("a: 1\n", resumed_step=0)
    files.log_metrics(0, {"a": 1.0})
    files.log_metrics(1, {"a": np.float32(2.0), "text": "not a figure"})
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1]) == {"step": 1, "data": {"a": 2.0}}
    files.open("a: 1\n", resumed_step=0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert (tmp_path / "run_config.yaml").read_text() == "a: 1\n"
    assert json.loads((tmp_path / "versions.json").read_text())["torch"] == installed_versions()["torch"]


def test_samples_are_best_worst_and_others_each_once():
    scores = (0.1, 0.9, 0.5, 0.3, 0.7, 0.2, 0.8, 0.9)  # the last one is the second's text again
    rows = [{"prompt": "p", "response": f"r{s}", "score": s} for s in scores]
    picked = pick_samples(rows, seed=1)
    by_kind = {kind: [p["score"] for p in picked if p["kind"] == kind] for kind in ("best", "worst", "random")}
    assert by_kind["best"] == [0.9, 0.8]
    assert by_kind["worst"] == [0.1, 0.2]
    assert len({p["score"] for p in picked}) == 6 and set(by_kind["random"]) <= {0.5, 0.3, 0.7}
    assert pick_samples(rows, seed=1) == picked
    assert [p["kind"] for p in pick_samples(rows[:3], seed=1)] == ["best", "best", "worst"]


def test_a_run_leaves_samples_of_about_twenty_steps(tmp_path):
    files = RunFiles(str(tmp_path), total_steps=100, with_report=False)
    due = [s for s in range(1, 101) if files.samples_due(s, is_last=s == 100)]
    assert due == [1, *range(5, 101, 5)]


def test_jsonl_takes_numpy_values(tmp_path):
    write_jsonl(tmp_path / "new" / "1.jsonl", [{"a": np.int64(3), "b": np.arange(2), "c": {1}}])
    assert json.loads((tmp_path / "new" / "1.jsonl").read_text()) == {"a": 3, "b": [0, 1], "c": "{1}"}
