"""The demo of a scorer on a pretrained pair: stages, commands, gains, server.

Not covered: the figures of the pretrained pair (`make demo-pretrained-spd` shows them).
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.demo_runner import PhaseFailed
from examples.pretrained.spd import blocks, demo, gains, labels, serve
from examples.pretrained.stages import Stage, run
from tests.examples.test_spd_commands import evaluated, trained_config
from tests.helpers.models import save_tiny_llama
from tests.spd.vllm_plugin.pair import make_pair, make_prompts
from verl.data.fingerprint import model_dir_fingerprint
from verl.utils.tokenizer import hf_tokenizer


@pytest.fixture
def pair(tmp_path):
    return demo.Pair(tmp_path / "target", tmp_path / "draft", tmp_path / "gsm8k", tmp_path / "out")


HEAD = ("spd.head_inputs=logits", "spd.state_layer=1")


def all_stages(pair, roles=("supervised",), own_labels=True, **sizes):
    of_pair = demo.pair_stages(pair, demo.Sizes(**sizes), own_labels)
    return of_pair + [stage for seed in (0, 1)
                      for stage in demo.scorer_stages(of_pair[-1], pair, demo.Sizes(**sizes), seed, roles, HEAD)]


def option(stage, name):
    return stage.command[list(stage.command).index(name) + 1]


def test_a_stage_runs_once_resumes_and_starts_again_with_other_settings(tmp_path):
    result = tmp_path / "result"
    code = f"open({str(result)!r}, 'a').write('x'); import sys; sys.exit(int(sys.argv[1]))"
    stage = Stage("one", [sys.executable, "-c", code, "0"], result)
    run(stage, tmp_path)
    run(stage, tmp_path)
    assert result.read_text() == "x"
    failing = Stage("one", [sys.executable, "-c", code, "3"], result)
    for _ in range(2):
        with pytest.raises(PhaseFailed, match="ended with 3"):
            run(failing, tmp_path)
    assert result.read_text() == "xx"  # other settings: removed; then continued
    reading = [Stage("two", ["true"], result, (given,)).key for given in (stage, failing)]
    assert reading[0] != reading[1]
    assert Stage("two", ["true"], result).key != Stage("two", ["true"], result, given="{}").key


def test_gains_at_an_equal_drop_by_hand():
    """Of 100 questions the scorer loses one at 4 accepted tokens a forward and ten at 6, the margin rule four at 3."""

    def run(rule, threshold, lost, accepted):
        return {"rule": rule, "threshold": threshold, "correct": [i >= lost for i in range(100)],
                "accepted": [accepted] * 100, "rounds": [1] * 100}  # fmt: skip

    runs = [run("exact", None, 0, 2), run("margin", 3.0, 4, 3), run("scorer_sweep", 0.0, 1, 4),
            run("scorer_sweep", -1.0, 10, 6), run("words", 0.0, 30, 7)]  # fmt: skip
    result = gains.gains({"validation": runs, "test": [*runs[:2], {**runs[2], "rule": "scorer"}, *runs[3:]]})
    assert (result["scorer"], result["rule"]) == ("trained scorer, swept", "margin rule, swept")
    # At 2 points: half of the questions by the margin rule; the scorer mixes 1 and 10 points, 1/9 by the latter.
    assert result["accepted"] == pytest.approx({"scorer": 4 + 2 / 9, "rule": 2.5, "exact": 2.0})
    assert result["spd_gain_over_best_rule"] == pytest.approx((4 + 2 / 9) / 2.5)
    low, high = result["spd_gain_over_best_rule_95"]
    assert low < result["spd_gain_over_best_rule"] < high


def test_labels_are_computed_for_every_pair_but_the_one_whose_labels_are_stored(pair, tmp_path, monkeypatch):
    for number, folder in enumerate((pair.target, pair.draft)):
        save_tiny_llama(folder, seed=number)
    monkeypatch.setattr(demo, "LABELS", tmp_path)
    assert not demo.fits_stored_labels(pair)
    prints = {name: model_dir_fingerprint(getattr(pair, name)) for name in ("target", "draft")}
    (tmp_path / "models.json").write_text(json.dumps(prints))
    assert demo.fits_stored_labels(pair)
    assert not demo.fits_stored_labels(demo.Pair(pair.draft, pair.target, pair.gsm8k, pair.out))
    stored, own = (demo.pair_stages(pair, demo.Sizes(train=70, val=30), own) for own in (False, True))
    assert [stage.name for stage in stored] == ["blocks"] and option(stored[0], "--labels") == str(tmp_path)
    assert [stage.name for stage in own] == ["labels_train", "labels_val", "labels_test", "blocks"]
    folder = option(own[-1], "--labels")
    assert all(stage.result == Path(folder) / f"{stage.name[7:]}.parquet" for stage in own[:3])
    # Validation questions are the first ones of the training file, which training questions follow.
    asked = [[option(stage, name) for name in ("--skip", "--count")] for stage in own[:3]]
    assert asked == [["30", "70"], ["0", "30"], ["0", "300"]]
    assert ["--wrong" in stage.command for stage in own[:3]] == [True, True, False]
    assert [Path(option(stage, "--questions")).name for stage in own[:3]] == ["train.jsonl"] * 2 + ["test.jsonl"]


def test_a_labelled_mismatch_becomes_a_block_of_one_draft_token_whose_label_is_the_change_of_the_answer():
    rows = [
        {"question": 7, "parent": -1, "position": 0, "ids": [5, 6, 9, 2], "draft_ids": [5, 8, 9, 1], "right": True},
        {"question": 7, "parent": 0, "position": 1, "ids": [8, 10, 2], "draft_ids": [], "right": False},
        {"question": 7, "parent": 0, "position": 3, "ids": [1], "draft_ids": [], "right": True},
        {"question": 8, "parent": -1, "position": 0, "ids": [5, 2], "draft_ids": [6, 2], "right": False},
        {"question": 8, "parent": 3, "position": 0, "ids": [6, 2], "draft_ids": [], "right": True},
        {"question": 8, "parent": 3, "position": 1, "ids": [4, 5, 6], "draft_ids": [], "right": False},
    ]  # fmt: skip
    common = {"question_id": "val-7", "is_correct_baseline": 1, "question_len": 2}
    other = {"question_id": "val-8", "is_correct_baseline": 0, "question_len": 1}
    assert list(blocks.blocks_of(rows, {7: [3, 4], 8: [3]}, "val")) == [
        {"block_id": "val-1", **common, "context_ids": [3, 4, 5], "draft_ids": [8], "target_ids": [6, 10],
         "baseline_length": 3, "labels": [0.0]},
        {"block_id": "val-2", **common, "context_ids": [3, 4, 5, 6, 9], "draft_ids": [1], "target_ids": [2, 1],
         "baseline_length": 1, "labels": [0.5]},
        {"block_id": "val-4", **other, "context_ids": [3], "draft_ids": [6], "target_ids": [5, 2],
         "baseline_length": 2, "labels": [1.0]},
        {"block_id": "val-5", **other, "context_ids": [3, 5], "draft_ids": [4], "target_ids": [2, 5],
         "baseline_length": 1, "labels": [pytest.approx(0.5 - 2 * 0.002)]},
    ]  # fmt: skip


def test_answers_whose_mismatches_are_labelled_or_that_have_none_are_left_alone():
    rows = [{"parent": -1, "ids": ids, "draft_ids": drafted, "right": right} for ids, drafted, right in (
        ([5, 2], [6, 2], True), ([5, 2], [5, 2], True), ([5, 2], [5, 3], False), ([7, 2], [8, 2], True))]  # fmt: skip
    rows.append({"parent": 3, "ids": [8, 2], "draft_ids": [], "right": True})
    assert labels.unlabelled(rows, False) == [0] and labels.unlabelled(rows, True) == [0, 2]
    stored = labels.read_rows(demo.LABELS / "train.parquet")
    assert labels.unlabelled(stored, True) == []


def test_the_stored_labels_are_of_distinct_questions_and_begin_with_the_drafts_token():
    asked = {}
    for split in ("train", "val", "test"):
        file = demo.LABELS / f"{split}.parquet"
        rows = labels.read_rows(file)
        own = [row for row in rows if row["parent"] < 0]
        assert file.stat().st_size < 4 << 20 and len({row["question"] for row in own}) == len(own)
        asked[split] = {row["question"] for row in own}
        for row in rows:
            if row["parent"] >= 0:
                above = rows[row["parent"]]
                assert above["question"] == row["question"] and above["parent"] < 0
                assert above["draft_ids"][row["position"]] == row["ids"][0] != above["ids"][row["position"]]
    assert not asked["train"] & asked["val"] and len(asked["val"]) == len(asked["test"]) == 300


def test_every_stage_follows_those_that_it_reads(pair):
    def changed(**sizes):
        return {a.name for a, b in zip(stages, all_stages(pair, demo.ROLES, **sizes), strict=True) if a.key != b.key}

    stages = all_stages(pair, demo.ROLES)
    assert len({stage.name for stage in stages}) == len({stage.result for stage in stages}) == len(stages)
    for number, stage in enumerate(stages):
        assert {read.name for read in stage.reads} <= {earlier.name for earlier in stages[:number]}
    of_scorers = {f"seed{seed}/{name}" for seed in (0, 1) for name in (*demo.ROLES, "evaluation", "served")}
    assert changed(train=9) == {"labels_train", "blocks"} | of_scorers
    assert changed(scorer_steps=9) == of_scorers
    assert changed(test=9) == {name for name in of_scorers if name.endswith(("evaluation", "served"))}
    assert changed(served=9) == {"seed0/served", "seed1/served"}
    assert sum(stage.training is not None for stage in stages) == 6


@pytest.mark.parametrize("roles", [("supervised",), demo.ROLES])
def test_the_commands_hand_on_what_the_one_before_leaves(pair, roles):
    *_, evaluation, served = stages = all_stages(pair, roles, val=40, gamma=5)
    by_name = {stage.name: stage for stage in stages}
    config, trained = trained_config([*by_name["seed1/supervised"].command])
    assert trained.supervised and trained.blocks == str(pair.prepared / "blocks_train.parquet")
    assert (config.spd.seed, config.spd.rollout.max_tokens, config.spd.state_layer) == (1, 200, 1)
    judged = evaluated([*evaluation.command])
    supervised = str(pair.out / "seed1" / "supervised" / "supervised")
    assert judged.scorers["scorer" if len(roles) == 1 else "supervised"] == supervised
    assert len(judged.scorers) == len(roles)
    assert (judged.val_limit, judged.limit, judged.gamma, judged.near_drop) == (40, 500, 5, gains.DROP)
    assert judged.questions.parent == judged.val_harm_labels.parent == pair.prepared
    args = serve.parse([*served.command][3:])
    assert dict(part.split("=") for part in args.scorers) == judged.scorers
    assert (args.evaluation, args.questions, args.limit) == (judged.out, judged.questions, 48)


def test_models_and_questions_that_do_not_fit_are_refused_at_the_start(tmp_path, tiny_llama, capsys):
    out = ["--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        demo.main([*out, "--target", tiny_llama])
    assert "give both --target and --draft" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        demo.main([*out, "--roles", "refined"])
    assert "add supervised" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no train.jsonl and no test.jsonl. .* name their folder with --gsm8k DIR"):
        demo.main([*out, "--gsm8k", str(tmp_path)])
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "1 + 1", "answer": "#### 2"}\n')
    out += ["--gsm8k", str(tmp_path), "--target", tiny_llama, "--draft"]
    with pytest.raises(SystemExit, match="--draft .*no-model: there is no such folder"):
        demo.main([*out, str(tmp_path / "no-model")])
    tokenizer, plain = hf_tokenizer(tiny_llama), tmp_path / "plain"
    save_tiny_llama(plain)
    for file in plain.glob("*chat_template*"):
        file.unlink()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(plain)
    with pytest.raises(SystemExit, match="--draft .*its tokenizer has no chat template"):
        demo.main([*out, str(plain)])
    assert not (tmp_path / "out").exists()


def test_the_blocks_of_another_pair_are_kept(tmp_path, tiny_llama, monkeypatch):
    monkeypatch.setattr(demo.fetch, "gsm8k_folder", lambda given: given)
    file = tmp_path / "out" / "stages" / "blocks.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"key": "of another pair", "command": [], "seconds": 5.0, "ended": True}))
    (tmp_path / "out" / "pair").mkdir()
    with pytest.raises(SystemExit, match="blocks was made by another command .* with --out .*, or delete .*/out.$"):
        demo.main(["--out", str(tmp_path / "out"), "--target", tiny_llama, "--draft", tiny_llama])
    file.unlink()
    with pytest.raises(SystemExit, match="out/pair exists, but was not made by this command"):
        demo.main(["--out", str(tmp_path / "out"), "--target", tiny_llama, "--draft", tiny_llama])
    assert (tmp_path / "out" / "pair").exists()


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_reads_logits_where_the_training_can_compute_them(tmp_path, tied):
    target = save_tiny_llama(tmp_path / "target", tied=tied)
    inputs, layer = demo.head_settings(Path(target))
    assert inputs == f"spd.head_inputs={'logits' if tied else 'pair'}" and layer == "spd.state_layer=1"


def row(decoding, drafts, gamma, speeds):
    return [{"decoding": decoding, "drafts": drafts, "gamma": gamma, "concurrent": n, "tokens_per_second": speed,
             "tokens_per_draft": 2.5, "accuracy": 0.5, "cpu_seconds": 1.0}
            for n, speed in zip((1, 4, 16), speeds, strict=True)]  # fmt: skip


def test_served_ratios_are_those_of_each_sides_best_number_of_draft_tokens():
    rounds = [[*row("greedy", "none", None, (9 + k, 20, 40)), *row("exact", "model", 3, (20, 30, 40)),
               *row("exact", "model", 8, (22, 20, 10)), *row("scorer", "model", 3, (22, 33, 44)),
               *row("scorer", "model", 8, (33, 21, 11))] for k in (0, 2)]  # fmt: skip
    found = serve.medians(rounds[0] + rounds[1])
    assert len(found) == 15 and found[0]["tokens_per_second"] == 10
    assert serve.ratios(found, "model") == {
        "spd_served_over_exact": pytest.approx({1: 33 / 22, 4: 1.1, 16: 1.1}),
        "spd_served_over_greedy": pytest.approx({1: 3.3, 4: 33 / 20, 16: 1.1}),
    }
    record = {"questions": 6, "threshold": 0.5, "rows": found, "ratios": {"model": serve.ratios(found, "model")}}
    assert "model; the scorer's tokens per second over exact match: 1.50 at 1, 1.10 at 4" in serve.described(record)


def test_the_figures_that_exist_are_reported(tmp_path, capsys):
    folder = tmp_path / "seed0" / "evaluation"
    folder.mkdir(parents=True)
    (tmp_path / "seed0" / "served").mkdir()
    runs = [{"rule": rule, "threshold": threshold, "correct": [True] * 4, "accepted": [accepted] * 4, "rounds": [1] * 4}
            for rule, threshold, accepted in (("exact", None, 2), ("margin", 1.0, 3), ("scorer_sweep", 5.0, 6))]
    (folder / "by_question.json").write_text(json.dumps({"validation": runs, "test": runs}))
    rows = [{"rule": rule, "accuracy": 0.75, "accepted_per_forward": 2.0} for rule in ("target", "exact")]
    areas = {"validation": {}, "test": {"scorer": 0.8, "margin": 0.7}}
    (folder / "evaluation.json").write_text(json.dumps({"questions": 4, "rows": rows, "areas": areas}))
    found = row("greedy", "none", None, (1, 2, 3)) + row("exact", "model", 3, (2, 3, 4)) + row("scorer", "model", 3, (
        3, 4, 5))  # fmt: skip
    served = {"questions": 2, "threshold": 1.0, "rows": found, "ratios": {"model": serve.ratios(found, "model")}}
    (tmp_path / "seed0" / "served" / "served.json").write_text(json.dumps(served))
    demo.report(tmp_path, [0, 1])
    printed = " ".join(capsys.readouterr().out.split())
    assert "the target answers 75.0 % right, the pair by exact match 75.0 %, which accepts 2.00 draft tokens" in printed
    assert "scorer 0.80, margin 0.70" in printed and "means over 1 seeds" in printed and "5.0 (3)" in printed
    kept = json.loads((tmp_path / "gains.json").read_text())
    assert kept["means"] == {"spd_gain_over_best_rule": 2.0, "spd_gain_over_exact": 3.0}
    assert kept["seeds"]["0"]["areas"] == areas["test"]


@pytest.mark.process
def test_a_pair_is_served_with_drafts_of_the_model_and_by_lookup(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(serve, "CONCURRENT", (1, 2))
    pair = make_pair(tmp_path, tied=True)
    questions = [{"question_id": f"test-{i}", "question": "q", "prompt_ids": ids, "ground_truth": "4"}
                 for i, ids in enumerate(make_prompts(6))]  # fmt: skip
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    runs = [
        {"rule": rule, "threshold": threshold, "correct": [right], "accepted": [accepted], "rounds": [1]}
        for rule, threshold, accepted, right in (
            ("exact", None, 2, True), ("scorer_sweep", 5.0, 3, True), ("refined_sweep", 0.0, 4, True),
            ("refined_sweep", -3.0, 5, True), ("refined_sweep", -5.0, 6, False),
        )
    ]  # fmt: skip
    (tmp_path / "by_question.json").write_text(json.dumps({"validation": runs, "test": []}))
    command = [
        "--target", pair.target, "--draft", pair.draft, "--scorers", "scorer=nowhere", f"refined={pair.scorer}",
        "--questions", str(tmp_path / "questions.jsonl"), "--evaluation", str(tmp_path), "--gammas", "4", "--rounds",
        "1", "--max-new-tokens", "24", "--out", str(tmp_path / "served"), "--dtype", "float32",
    ]  # fmt: skip
    serve.main(command)
    record = json.loads((tmp_path / "served" / "served.json").read_text())
    assert (record["questions"], record["scorer"], record["threshold"]) == (6, "refined", -3.0)
    found = {(r["decoding"], r["drafts"]): r for r in record["rows"] if r["concurrent"] == 2}
    lookups = record["ratios"].keys() - {"model"}
    assert "n-gram" in lookups and len(record["rows"]) == 2 * len(found) == 2 * (3 + 2 * len(lookups))
    assert found["greedy", "none"]["tokens_per_draft"] is found["scorer", "n-gram"]["tokens_per_draft"] is None
    per_draft = [found[way, "model"]["tokens_per_draft"] for way in ("exact", "scorer")]
    assert per_draft[1] > per_draft[0] > 1
    assert min(r["cpu_seconds"] for r in record["rows"]) > 0
    assert "n-gram" in capsys.readouterr().out
    begun = [file.stat().st_mtime_ns for file in sorted((tmp_path / "served").glob("*.log"))]
    serve.main(command)  # measures nothing again
    assert begun == [file.stat().st_mtime_ns for file in sorted((tmp_path / "served").glob("*.log"))]


def test_a_scorer_that_no_threshold_serves_is_helped_by_more_steps(tmp_path, monkeypatch, capsys):
    (tmp_path / "by_question.json").write_text('{"validation": []}')
    monkeypatch.setattr(serve, "best", lambda validation, trained: "scorer")
    monkeypatch.setattr(serve, "curves", lambda validation: {"scorer": {0.0: SimpleNamespace(drop=1.0)}})
    with pytest.raises(SystemExit, match="--scorer-steps of examples.pretrained.spd.demo"):
        serve.chosen_scorer(tmp_path)
    with pytest.raises(SystemExit):
        demo.main(["--help"])
    assert "--scorer-steps" in capsys.readouterr().out
