"""The evaluation's arithmetic by hand, and the command on tiny random models."""

import json
import math
import multiprocessing
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from recipe.spd.rollout.decoder import SpecResult
from scripts import eval_spd_scorer
from scripts.spd_evaluation import harm, measures, pool, rules
from scripts.spd_evaluation.measures import EvaluationRow
from scripts.spd_evaluation.pool import Job, Run
from scripts.spd_evaluation.worker import Worker, load_model
from spd_scorer import AutoModelForSPDScoring, ScoringModelConfig
from tests.helpers.models import make_tokenizer, save_tiny_llama
from verl.utils.accelerator import default_dtype

KEYS = [
    "rule", "threshold", "accuracy", "accuracy_se", "drop", "drop_se", "accepted_per_forward", "tokens_per_forward",
    "output_length_ratio", "not_terminated", "harmless_accepted", "harmful_accepted", "seconds",
    "forwards_per_question",
]


def result_of(tokens, rounds, accepted, finished, judged=None, passed=None):
    zeros = [0] * len(tokens)
    return SpecResult(tokens, [[0] * len(t) for t in tokens], rounds, accepted, judged or zeros, passed or zeros,
                      finished, 2.5)


def test_measures_by_hand():
    result = result_of([[1] * 6, [1] * 9, [1] * 3, [1] * 2], [2, 3, 1, 1], [4, 6, 2, 1], [True, True, True, False])
    row = measures.measure(
        "margin", 3.0, result, [True, False, True, False], exact_correct=[True, True, True, False], target_tokens=16
    )
    assert row.accuracy == 0.5
    assert row.accuracy_se == pytest.approx(math.sqrt(4 * 0.25 / 3 / 4))
    assert row.drop == 0.25  # one of four questions lost
    # differences 0, 1, 0, 0: variance (3 / 16 + 9 / 16) / 3 = 1/4, over four questions
    assert row.drop_se == pytest.approx(0.25)
    assert row.accepted_per_forward == 13 / 7
    assert row.tokens_per_forward == 20 / 7
    assert row.output_length_ratio == 1.25
    assert row.not_terminated == 0.25
    assert (row.rule, row.threshold, row.seconds) == ("margin", 3.0, 2.5)


def test_errors_of_several_samples_are_between_questions():
    result = result_of([[1] * 4] * 4, [1] * 4, [3] * 4, [True] * 4)
    row = measures.measure("exact", None, result, [True, False, True, True], exact_correct=[True] * 4, target_tokens=16,
                           samples=2)  # fmt: skip
    assert (row.accuracy, row.drop) == (0.75, 0.25)
    assert row.drop_se == pytest.approx(0.25)  # two questions lose 0.5 and 0: variance 1/8, over two


def row_of(threshold, drop, speed, accuracy=0.9, error=0.0):
    values = (accuracy, 0.0, drop, error, speed, speed + 1, 1.0, 0.0, None, None, 0.0, 60 / (speed + 1))
    return EvaluationRow("scorer", threshold, *values)


def test_threshold_is_the_fastest_within_the_drop_else_the_least_drop():
    rows = [row_of(0, 0.02, 5.9), row_of(2, 0.004, 5.6), row_of(4, -0.01, 4.8)]
    assert measures.choose_threshold(rows, 0.005).threshold == 2
    assert measures.choose_threshold(rows, 0.03).threshold == 0
    assert measures.choose_threshold(rows, 0.02).threshold == 0  # "within" takes the limit in
    assert measures.choose_threshold(rows, -0.02).threshold == 4
    # The interval decides, not the point: 0.004 + 1.96 * 0.004 = 0.0118, 0.006 + 1.96 * 0.001 = 0.008
    noisy = [row_of(0, 0.004, 5.9, error=0.004), row_of(2, 0.006, 5.6, error=0.001), row_of(4, 0.0, 4.8)]
    assert measures.choose_threshold(noisy, 0.01).threshold == 2
    assert measures.choose_threshold(noisy[:2], 0.001).threshold == 2
    with pytest.raises(ValueError, match="at least one scorer threshold"):
        measures.choose_threshold([], 0.0)


# Three labelled blocks: (z, harmful) of their reachable mismatches.
LABELLED = [[(2.0, False), (1.0, True)], [(0.5, False), (0.2, False), (-1.0, False)], [(1.5, True)]]


def test_thresholds_are_spread_over_the_harmless_mismatches():
    # harmless z: 2, 0.5, 0.2, -1; each threshold halfway to the next larger one
    assert measures.spread_thresholds(LABELLED, [0, 0.25, 0.5, 0.75, 0.8]) == pytest.approx([2.0, 1.25, 0.35, -0.4])
    with pytest.raises(ValueError, match="no labelled mismatch of the validation blocks is harmless"):
        measures.spread_thresholds([[(1.0, True)]], [0.5])


def test_three_thresholds_are_tried_by_bisection_for_a_drop():
    """Of 100 answers, k break at the k-th of 19 thresholds; a rule with one threshold tries that one."""

    class Decoded:
        def submit(self, runs):
            self.asked = getattr(self, "asked", []) + [run.threshold for run in runs]

        def result(self, run):
            broken = 0 if run.rule == "exact" else int(run.threshold)
            return SimpleNamespace(correct=[i >= broken for i in range(100)])

    pool, spread = Decoded(), {"scorer": [float(k) for k in range(1, 20)], "margin": [50.0]}
    assert eval_spd_scorer.searched(pool, spread, 0.07) == {"scorer": [5.0, 7.0, 10.0], "margin": [50.0]}
    assert pool.asked == [10.0, 50.0, 5.0, 7.0]


def test_areas_by_hand():
    blocks = [[(3.0, False), (1.0, True)], [(1.0, False), (2.0, True)]]
    # 3 is above both harmful ones, 1 ties with one: 2.5 of 4 pairs
    assert measures.harmless_share_and_auc(blocks) == (0.5, 0.625)
    assert measures.harmless_share_and_auc([[(3.0, False)]]) == (1.0, None)


def test_a_judge_without_error_by_hand():
    labels = [([5, 6, 7, 8], {1: False, 3: True}), ([5, 6, 7], {0: False}), ([5, 6], {0: True, 1: False})]
    blocks = [harm.LabelledBlock([1], draft, harmful) for draft, harmful in labels]
    assert measures.accepted_without_error(blocks) == ((1 + 0 + 0) / 3, (3 + 3 + 0) / 3)


def test_the_drop_is_pooled_from_whole_answers_and_harmful_accepts():
    row = row_of(0.4, 0.01, 5.0, error=0.003)
    # At z > 0.4 five mismatches are judged: 2.0, 1.0 | 0.5, 0.2 (rejected) | 1.5; two of them are harmful accepts.
    rate = 2.5 / 6
    counted, counted_se = 3 * rate, 3 * math.sqrt(rate * (1 - rate) / 6)  # 600 mismatches judged on 200 questions
    whole_se = math.sqrt(0.003**2 + 0.005**2)
    weights = 1 / counted_se**2, 1 / whole_se**2
    drop, error, error_of_labels = measures.pooled_drop(row, 200, 600, LABELLED)
    assert drop == pytest.approx((weights[0] * counted + weights[1] * 0.01) / sum(weights))
    assert error == pytest.approx(1 / math.sqrt(sum(weights))) and error_of_labels == pytest.approx(counted_se)
    # Above every z the first mismatch of each block is rejected, and nothing broke.
    strict = measures.pooled_drop(row_of(3.0, 0.0, 2.0), 200, 600, LABELLED)
    assert strict[0] < drop
    rows = [row_of(0, 0.0, 5.9), row_of(2, 0.0, 5.0)]
    assert measures.choose_threshold(rows, 0.01, [(0.02, 0.001), (0.004, 0.002)]).threshold == 2


def test_the_questions_that_a_drop_needs_are_counted_from_its_error():
    assert measures.questions_needed(0.0, 0.02, 0.01, 40) == 615  # 40 * (1.96 * 0.02 / 0.01)**2 = 614.7
    assert measures.questions_needed(0.005, 0.0025, 0.01, 100) == 97  # 100 * 0.98**2 = 96.04
    assert measures.questions_needed(0.01, 0.001, 0.01, 100) is None
    # Precisions of 100**2 by labels and 50**2 by 40 answers; 196**2 are wanted, so that the answers' part is to be
    # (196**2 - 100**2) / 50**2 = 11.37 times as large.
    error = 1 / math.sqrt(100**2 + 50**2)
    assert measures.questions_needed(0.0, error, 0.01, 40, 0.01) == 455


def test_curve_is_read_between_its_points():
    rows = [row_of(1, 0, 4.0, 0.80), row_of(2, 0, 2.0, 0.90)]
    # Forwards per token 1/3 and 1/5: a share p by the second gives (2/3 (1 - p) + 4/5 p) / (1/3 (1 - p) + 1/5 p)
    # accepted a forward, which is 2.5 at p = 5/14.
    assert measures.accuracy_on_curve(rows, 2.5) == pytest.approx(0.90 - 0.10 * 5 / 14)
    assert measures.accuracy_on_curve(rows, 4.0) == pytest.approx(0.80)
    assert measures.accuracy_on_curve(rows, 4.1) is None


def test_ngram_drafts_continue_the_first_occurrence_of_the_longest_suffix():
    # The prompt's last two tokens were followed by 3 4 5; the text agrees with 3 4 and goes on with 9 (round 1).
    # Nothing repeats 9 (round 2 commits 1); 1 was followed by 2 3, of which 2 is right (round 3 commits 2 and 8).
    own = result_of([[3, 4, 9, 1, 2, 8]], [6], [0], [True])
    drafted = measures.ngram_drafts([[1, 2, 3, 4, 5, 7, 1, 2]], own, gamma=3)
    assert (drafted.rounds, drafted.accepted, drafted.tokens) == ([3], [3], own.tokens)
    assert measures.ngram_drafts([[1]], own, gamma=3).rounds == [6]
    # The target writes 3 (round 1), 2 3 was followed by 4, and 9 replaces 5 (round 2); then as above.
    later = measures.ngram_drafts([[1, 2, 3, 4, 5, 7, 1, 2]], own, gamma=3, target_first=True)
    assert (later.rounds, later.accepted) == ([4], [2])


def test_the_thresholds_near_a_drop_are_two_of_the_best_rule_and_of_the_best_scorer():
    points = [(None, 0.0, 1.0), (1.0, 0.01, 2.0), (2.0, 0.03, 4.0), (3.0, 0.2, 5.0)]
    slower = {"typical": 0.9, "margin": 1.0, "refined_sweep": 0.8, "scorer_sweep": 1.0}
    rows = [replace(row_of(0, 0, factor * accepted, 1.0), rule="exact" if threshold is None else rule,
                    threshold=threshold, drop=drop)
            for rule, factor in slower.items() for threshold, drop, accepted in points]  # fmt: skip
    near = eval_spd_scorer.runs_near(rows, 0.02, ["scorer", "refined"])
    assert [(run.split, run.rule, run.threshold) for run in near] == [
        ("test", "margin", 1.0), ("test", "margin", 2.0), ("test", "scorer", 1.0), ("test", "scorer", 2.0)]


@pytest.mark.parametrize(("options", "said"), [
    (["--rule", "mine={}:f:1,,2"], "--rule mine="), (["--rule", "mine={}:f:e"], "--rule mine="),
    (["--rule", "mine={}:f", "mine={}:g"], "--rule mine="), (["--compare", "a=x", "a=y"], "--compare a=y: give"),
    (["--compare", "=x"], "--compare =x: give NAME=DIR"), (["--samples", "0"], "--samples 0: give at least 1"),
    (["--temperature", "-1"], "--temperature -1.0: give at least 0"), (["--samples", "2"], "samples need a temp"),
])  # fmt: skip
def test_an_option_that_the_evaluation_cannot_take_is_named(options, said, tmp_path, capsys):
    needed = [word for name in ("target", "draft", "scorer", "questions", "val-questions", "harm-labels", "out")
              for word in (f"--{name}", str(tmp_path / name))]  # fmt: skip
    given = [*needed, *(option.format(__file__) for option in options)]
    with pytest.raises(SystemExit):
        eval_spd_scorer.parse(given)
    assert said in capsys.readouterr().err
    numbers = eval_spd_scorer.parse([*needed, "--rule", f"mine={__file__}:f:1,-2.5,1e-3,.5"]).rules["mine"][2]
    assert numbers == [1.0, -2.5, 0.001, 0.5]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """Target and draft directories, questions and labelled blocks, all random."""
    root = tmp_path_factory.mktemp("eval")
    save_tiny_llama(root / "target", seed=0, vocab_size=64)
    save_tiny_llama(root / "draft", hidden=32, layers=1, seed=1, vocab_size=64)
    tokenizer = make_tokenizer()
    for split, count in (("test", 12), ("val", 6)):
        lines = []
        for i in range(count):
            prompt = tokenizer.encode(f"q : {i} + {i % 5} a :")
            lines.append({"question_id": f"{split}-{i}", "prompt_ids": prompt, "ground_truth": str(i + i % 5)})
        (root / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    labels = [
        {"block_id": f"test-{block}/own/0", "position": position, "context_ids": [5, 6, 7 + block],
         "draft_ids": [8, 9, 10], "harmful": harmful}
        for block, position, harmful in [(0, 0, False), (0, 2, True), (1, 1, True), (1, 2, False)]
    ]
    (root / "labels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in labels))
    return root


def test_harm_shares_by_hand(house):
    target, draft = (load_model(str(house / name), "cpu", "float32") for name in ("target", "draft"))
    blocks = harm.read_labels(house / "labels.jsonl")
    assert [block.harmful for block in blocks] == [{0: False, 2: True}, {1: True, 2: False}]

    def only(position):
        def judge(block):
            verdict = torch.zeros_like(block.mismatch)
            verdict[:, position] = True
            return verdict

        return judge

    shares = harm.harm_shares([rules.exact(), rules.accept_all(), only(1), only(2)], target, draft, blocks)
    # The last label of the second block stands after a harmful one and counts nowhere: one harmless, two harmful.
    assert shares == [(0.0, 0.0), (1.0, 1.0), (0.0, 0.5), (0.0, 0.5)]
    assert [block.reachable() for block in blocks] == [{0: False, 2: True}, {1: True}]


def test_labels_that_do_not_fit_are_named(house, tmp_path):
    lines, path = (house / "labels.jsonl").read_text().splitlines(), tmp_path / "bad.jsonl"
    path.write_text(lines[0] + "\n" + lines[1].replace("[8, 9, 10]", "[8, 9, 11]") + "\n")
    with pytest.raises(ValueError, match="line 2: block 'test-0/own/0' has another context or draft above"):
        harm.read_labels(path)
    path.write_text(lines[0].replace('"position": 0', '"position": 3') + "\n")
    with pytest.raises(ValueError, match="position 3 lies outside of the 3 draft tokens"):
        harm.read_labels(path)


def given(house, scorer, out, *options, val="val"):
    """Arguments of an evaluation of the tiny models."""
    files = {"target": "target", "draft": "draft", "questions": "test.jsonl", "val-questions": f"{val}.jsonl",
             "harm-labels": "labels.jsonl"}  # fmt: skip
    paths = [word for name, file in files.items() for word in (f"--{name}", str(house / file))]
    return [*paths, "--scorer", str(scorer), "--out", str(out), "--max-new-tokens", "12", "--gamma", "3", *options]


def run_script(house, scorer, out, *options):
    """Run the command on the tiny models; gives (evaluation.json, validation.json)."""
    swept = ("--scorer-thresholds", "-1", "0", "--margins", "0.01", "1")
    eval_spd_scorer.main(given(house, scorer, out, *swept, *options))
    return tuple(json.loads((out / name).read_text()) for name in ("evaluation.json", "validation.json"))


def save_scorer(house, backbone, path):
    config = ScoringModelConfig(base_model_path=str(house / "target"), backbone=backbone)
    AutoModelForSPDScoring.from_config(config).save_pretrained(path)
    return path


@pytest.mark.process
def test_the_command_writes_every_key_rule_and_picture(house, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pool, "SECONDS_BETWEEN_LINES", 0.0)
    scorer = save_scorer(house, "target", tmp_path / "scorer")
    record, choice = run_script(
        house, scorer, tmp_path / "out", "--divergences", "0.5", "--typicals", "0.09", "--ranks", "2", "--entropies",
        "0.1", "--all-rules", "--processes", "2", "--compare", f"twin={scorer}", "--max-val-drop", "-0.01",
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert "twin: no threshold keeps the drop" in shown and "12 held-out questions" in shown
    assert choice["met"] is False and choice["rule"].startswith("lowest end of the drop")
    shown = " ".join(shown.split())
    assert "drop accepted tokens length cut % harmless harmful s " in shown
    assert "this drop itself is not below the limit, so a narrower interval does not help" in shown
    line = r"\d+ of \d+ runs, [1-9]\d* of \d+ answers and labelled blocks, [\d.]+ a second, about [\d.]+ minutes left"
    assert re.search(line, shown)
    assert list(record) == ["questions", "dtype", "areas", "rows"] and record["dtype"] == default_dtype("cpu")
    assert record["questions"] == 12
    (areas,) = record["areas"].values()  # of test questions
    assert list(areas) == ["scorer", "twin", *rules.STATISTICS, "deferred"] and areas["scorer"] == areas["twin"]
    assert all(list(row) == KEYS for row in record["rows"])
    assert [row["rule"] for row in record["rows"]] == [
        "target", "exact", "all", "scorer", "twin", "random", "scorer_untrained", "margin", "margin", "typical",
        "top_rank", "rank_margin", "rank_margin", "deferred", "entropy", "divergence", "divergence_strict", "words",
        "scorer_sweep", "twin_sweep", "ngram",
    ]  # fmt: skip
    twins = [[row[k] for k in KEYS if k not in ("rule", "seconds")] for row in record["rows"] if row["rule"] in
             ("scorer", "twin")]  # fmt: skip
    assert twins[0] == twins[1]
    by_rule = {row["rule"]: row for row in record["rows"]}
    assert by_rule["exact"]["drop"] == by_rule["target"]["drop"] == 0.0
    assert by_rule["exact"]["output_length_ratio"] == by_rule["target"]["output_length_ratio"] == 1.0
    assert (by_rule["target"]["accepted_per_forward"], by_rule["target"]["tokens_per_forward"]) == (0.0, 1.0)
    assert by_rule["all"]["accepted_per_forward"] > 2.0
    assert (by_rule["exact"]["harmless_accepted"], by_rule["exact"]["harmful_accepted"]) == (0.0, 0.0)
    assert (by_rule["all"]["harmless_accepted"], by_rule["all"]["harmful_accepted"]) == (1.0, 1.0)
    assert by_rule["target"]["harmless_accepted"] is None
    assert [row["rule"] for row in choice["rows"]] == [
        "target", "exact", *["scorer_sweep"] * 2, *["twin_sweep"] * 2, "margin", "margin", "typical", "top_rank",
        "rank_margin", "rank_margin", "deferred", "entropy", "divergence", "divergence_strict", "words",
    ]  # fmt: skip
    assert {row["threshold"] for row in choice["rows"] if row["rule"] == "scorer_sweep"} == {-1.0, 0.0}
    chosen = measures.choose_threshold([EvaluationRow(**row) for row in choice["rows"][2:4]], 0.01).threshold
    assert choice["chosen"] == by_rule["scorer"]["threshold"] == chosen
    (at,) = (row for row in choice["rows"] if row["rule"] == "scorer_sweep" and row["threshold"] == chosen)
    assert choice["drop"] == at["drop"] and choice["interval"][1] == at["drop"] + 1.96 * at["drop_se"]
    assert choice["drop"] - choice["interval"][0] == pytest.approx(choice["interval"][1] - choice["drop"])
    assert (tmp_path / "out" / "evaluation.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.process
def test_labelled_validation_blocks_spread_and_choose_the_thresholds(house, tmp_path, capsys, monkeypatch):
    of_labels = Mock(wraps=measures.harmless_share_and_auc)
    monkeypatch.setattr(measures, "harmless_share_and_auc", of_labels)
    scorer, own = save_scorer(house, "target", tmp_path / "scorer"), tmp_path / "my_judge.py"
    own.write_text("from scripts.spd_evaluation.rules import margin\n")
    eval_spd_scorer.main(given(
        house, scorer, tmp_path, "--rule", f"mine={own}:margin:1,2", "--val-harm-labels", str(house / "labels.jsonl"),
        "--margins", "1", "--typicals", "0.09", "--harmless-shares", "0", "1", "--processes", "1", "--all-rules",
        "--near-drop", "0.02", "--dtype", "float32",
    ))  # fmt: skip
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search("of their blocks exact match accepts [\\d.]+ draft tokens, a judge without error [\\d.]+", shown)
    assert re.search("33 % are harmless; area under the ROC curve: scorer [\\d.]+, margin [\\d.]+, probability", shown)
    rows = json.loads((tmp_path / "validation.json").read_text())["rows"]
    one, mine = ({**row, "rule": "", "seconds": 0} for row in rows
                 if row["rule"] in ("margin", "mine") and row["threshold"] == 1)  # fmt: skip
    assert one == mine
    by_question = json.loads((tmp_path / "by_question.json").read_text())
    assert {split: {len(run["accepted"]) for run in runs} for split, runs in by_question.items()} == {
        "validation": {6}, "test": {12}}
    assert [run["rule"] for run in by_question["validation"]] == [row["rule"] for row in rows]
    tested = [(run["rule"].removesuffix("_sweep"), run["threshold"]) for run in by_question["test"]]
    near = eval_spd_scorer.runs_near([EvaluationRow(**row) for row in rows], 0.02, ["scorer"])
    chosen = json.loads((tmp_path / "validation.json").read_text())["chosen"]
    assert sorted(tested[2:]) == sorted({("scorer", chosen), *((run.rule, run.threshold) for run in near)})
    target, draft = (load_model(str(house / name), "cpu", "float32") for name in ("target", "draft"))
    model = AutoModelForSPDScoring.from_pretrained(scorer, base_model=target)
    blocks = harm.read_labels(house / "labels.jsonl")
    labelled = harm.labelled_scores({"z": model.block_scores()}, target, draft, blocks)["z"]
    assert [[harmful for _, harmful in block] for block in labelled] == [[False, True], [True]]
    swept = [row["threshold"] for row in rows if row["rule"] == "scorer_sweep"]
    assert swept == [pytest.approx(labelled[0][0][0])]  # the one harmless mismatch
    areas = json.loads((tmp_path / "evaluation.json").read_text())["areas"]
    (harmless, harmful), (other,) = [[z for z, _ in block] for block in labelled]
    assert areas["test"] == areas["validation"]  # the same labels
    assert of_labels.call_count == 2 * len(areas["test"])
    assert areas["test"]["scorer"] == ((harmless > harmful) + (harmless > other)) / 2


@pytest.mark.process
def test_the_number_of_processes_changes_nothing(house, tmp_path, capsys):
    scorer, labels = save_scorer(house, "own", tmp_path / "scorer"), str(house / "labels.jsonl")
    records = []
    for processes in ("1", "2"):
        options = ("--processes", processes, "--val-harm-labels", labels)
        records.append(run_script(house, scorer, tmp_path / processes, *options))
        shown = " ".join(capsys.readouterr().out.split())
        assert "labelled validation mismatches: 33 % are harmless; area under the ROC curve: scorer " in shown
        for record in records[-1]:
            for row in record["rows"]:
                assert row.pop("seconds") > 0.0
    assert records[0] == records[1]


@pytest.mark.process
def test_an_error_in_a_worker_ends_the_command_and_every_worker(house, tmp_path):
    before = set(multiprocessing.active_children())
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run_script(house, tmp_path / "nowhere", tmp_path / "out", "--processes", "2")
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.process
def test_a_stopped_evaluation_continues_with_its_finished_parts(house, tmp_path, monkeypatch, capsys):
    scorer = save_scorer(house, "target", tmp_path / "scorer")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    _, choice = run_script(house, scorer, whole, "--processes", "1")
    assert not (whole / "finished_runs").exists()
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    with monkeypatch.context() as patch:
        patch.setattr(measures, "choose_threshold", lambda *_: 1 / 0)  # the validation runs are there
        with pytest.raises(ZeroDivisionError):
            run_script(house, scorer, stopped, "--processes", "1")
    folder = stopped / "finished_runs"
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert before and run_script(house, scorer, stopped, "--processes", "1")[1]["chosen"] == choice["chosen"]
    assert f"continues with the {len(before)} finished parts" in " ".join(capsys.readouterr().out.split())
    after = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert before.items() <= after.items() and len(after) > len(before)


@pytest.mark.process
def test_evaluations_of_two_scorers_decode_each_rule_once(house, tmp_path):
    parts, made, shares = tmp_path / "parts", [], set()
    for kind in ("target", "own"):
        scorer = save_scorer(house, kind, tmp_path / kind)
        record, _ = run_script(house, scorer, tmp_path / f"{kind}_out", "--processes", "1", "--parts", str(parts))
        shares |= {row["threshold"] for row in record["rows"] if row["rule"] == "random"}
        made.append({file.name: file.stat().st_mtime_ns for file in parts.iterdir()})
    assert made[0].items() <= made[1].items()
    # Of the second scorer: two thresholds on two splits; untrained; its values of test labels and those that it passes;
    # the same by chance.
    assert len(made[1]) - len(made[0]) == 2 * 2 + 1 + 2 + 2 * (len(shares) - 1) < len(made[0])


WITH_A_WORKER = """
import argparse, time
from rich.progress import Progress
from scripts.spd_evaluation.pool import Job, Pool
pool = Pool(Job(argparse.Namespace(device="cpu"), {}, [], []), 1, Progress(disable=True))
pool._executor.submit(print, "up", flush=True)
time.sleep(600)
"""


@pytest.mark.process
def test_workers_end_with_a_killed_parent():
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", WITH_A_WORKER], stdout=subprocess.PIPE, text=True, cwd=root)
    assert parent.stdout.readline() == "up\n"  # the worker's word, through the output it shares with its parent
    parent.kill()
    parent.communicate(timeout=120)  # ends when nobody holds that output any more


def test_a_question_in_both_splits_is_refused(house, tmp_path):
    scorer = save_scorer(house, "target", tmp_path / "scorer")
    with pytest.raises(ValueError, match="12 questions are in both splits"):
        eval_spd_scorer.main(given(house, scorer, tmp_path, val="test"))


def test_shares_of_harmless_mismatches_need_labels(house, tmp_path):
    args = given(house, "s", tmp_path, "--harmless-shares", "0.5", "--scorer-thresholds", "0")
    with pytest.raises(ValueError, match="--val-harm-labels None gives no labels: .* no --harmless-shares"):
        eval_spd_scorer.load_job(eval_spd_scorer.parse(args))


def test_a_run_is_the_sum_of_its_parts(house, tmp_path):
    scorer = save_scorer(house, "target", tmp_path / "scorer")
    args = eval_spd_scorer.parse(given(house, scorer, tmp_path, "--batch-size", "5"))
    job = eval_spd_scorer.load_job(args)
    worker = Worker(job, multiprocessing.Value("q", 0))
    run = Run("test", "margin", 1.0)
    parts = run.parts(job)
    assert [(part.first, part.last) for part in parts] == [(0, 5), (5, 10), (10, 12)]
    whole, joined = worker.decode(run), run.joined([worker.decode(part) for part in parts])
    whole.result.seconds = joined.result.seconds = 0.0
    assert joined == whole and len(joined.correct) == 12


def test_all_models_have_the_dtype_that_is_asked_for(house, tmp_path):
    words = given(house, save_scorer(house, "target", tmp_path / "scorer"), "o", "--dtype", "bfloat16")
    worker = Worker(Job(eval_spd_scorer.parse(words), {}, [], []), multiprocessing.Value("q", 0))
    scorer = worker._load_scorers()["scorer"]  # its head stays in float32
    assert [model.dtype for model in (worker.target, worker.draft, scorer.backbone)] == 3 * [torch.bfloat16]
