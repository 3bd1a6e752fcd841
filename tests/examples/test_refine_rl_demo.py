"""The demo of RL with drafts: commands as their entries read them, criteria, benchmark. Nothing is trained.

Not covered: the trained figures (`make demo-refine-rl` and `make bench BENCH=speculative` show them).
"""

import json
import shutil
import sys

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from benchmarks import lossless, speculative
from benchmarks.run import WANTED
from examples.demo_runner import PhaseFailed
from examples.dllm_arithmetic.corpus import compute_score
from examples.refine_rl_arithmetic import demo, generation, results
from tests.examples.test_grpo_demo import trained_config


def configs(tmp_path, runs):
    return {name: trained_config(demo.training_command(tmp_path, tmp_path, tmp_path / "run", 10, 3, more))
            for name, more in runs.items()}  # fmt: skip


def test_runs_differ_only_in_rollout_and_refinement_loss(tmp_path):
    made = configs(tmp_path, demo.RUNS)
    actors = {name: config.actor_rollout_ref.actor for name, config in made.items()}
    assert [made[name].actor_rollout_ref.rollout.name for name in made] == ["hf", *["refine"] * 5]
    assert actors["plain"].auxiliary_losses == actors["refine"].auxiliary_losses == {}
    loss = actors["refine_all"].auxiliary_losses.refine_loss
    assert loss.coef > 0
    assert actors["refine_positive"].auxiliary_losses.refine_loss == {**loss, "samples": "positive"}
    actors["refine_positive"].auxiliary_losses = actors["refine_all"].auxiliary_losses
    assert made["refine_positive"] == made["refine_all"]
    for name in ("refine", "refine_all"):
        fast = made[f"{name}_fast"]
        assert fast.actor_rollout_ref.actor.optim.lr == 10 * actors[name].optim.lr
        fast.actor_rollout_ref.actor.optim.lr = actors[name].optim.lr
        assert fast == made[name]
    for config in made.values():
        OmegaConf.set_struct(config, False)
        del config.actor_rollout_ref.actor["auxiliary_losses"]
        del config.actor_rollout_ref.rollout["name"], config.actor_rollout_ref.rollout["custom"]
    assert made["plain"] == made["refine"] == made["refine_all"]
    batch = made["plain"].data.train_batch_size * made["plain"].actor_rollout_ref.rollout.n
    assert (made["plain"].data.seed, batch) == (3, results.SAMPLES)


def test_a_student_is_taught_by_the_teacher_or_by_rewards(tmp_path):
    students = demo.students_of(tmp_path / "teacher")
    made = configs(tmp_path, students)
    assert made["opd"].algorithm.adv_estimator == "opd"
    assert made["opd"].actor_rollout_ref.ref.model_path == str(tmp_path / "teacher")
    assert made["grpo"].algorithm.adv_estimator == "grpo" and made["grpo"].actor_rollout_ref.ref.model_path is None


def test_jobs_that_have_ended_are_not_run_again(tmp_path, tiny_llama):
    def job(name, code):
        mark = f"import pathlib; f = pathlib.Path({str(tmp_path / name)!r} + '.runs'); "
        mark += "f.write_text((f.read_text() if f.exists() else '') + 'x'); "
        return [sys.executable, "-c", mark + code], tmp_path / f"{name}.log"

    def runs(*names):
        return [(tmp_path / f"{name}.runs").read_text() for name in names]

    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    (tmp_path / "b").mkdir()  # what a killed run left
    jobs = [job("a", ""), job("b", f"assert not pathlib.Path({str(tmp_path / 'b')!r}).exists()")]
    demo.run_once(jobs, [model])
    with pytest.raises(PhaseFailed, match="ended with 1"):
        demo.run_once([*jobs, job("c", "1 / 0")], [model])
    assert runs("a", "b", "c") == ["x", "x", "x"]
    demo.run_once([*jobs, job("c", "")], [model])
    assert runs("a", "b", "c") == ["x", "x", "xx"]
    (model / "generation_config.json").write_text("{}")  # another model
    demo.run_once(jobs, [model])
    assert runs("a", "b", "c") == ["xx", "xx", "xx"]


def test_questions_in_the_rl_format(tmp_path):
    table = pd.DataFrame({"instruction": ["a b ?"], "output": ["the answer is 1 2"], "answer": ["12"]})
    for split in ("train", "val"):
        table.to_parquet(tmp_path / f"{split}.parquet")
    demo.write_questions(tmp_path, tmp_path / "data")
    (row,) = pd.read_parquet(tmp_path / "data" / "val.parquet").to_dict("records")
    assert row["prompt"][0]["content"] == "a b ?" and row["data_source"] in results.METRICS["accuracy"]
    assert compute_score("", "the answer is 1 2", row["reward_model"]["ground_truth"]) == 1.0


def constant(steps, **columns):
    return {name: dict.fromkeys(range(1, steps + 1), value) for name, value in columns.items()}


def run_of(reward, tokens, accuracy=(0.5, 0.9)):
    series = constant(20, reward=reward, tokens_per_forward=tokens, length=60.0, longest=90.0, forwards=30.0)
    return series | {"accuracy": {0: accuracy[0], 20: accuracy[1]}}


def shown(fast=4.7, kept=5.0, reward=0.9, walls=3.0, opd=(0.2, 0.4), grpo=(0.2, 0.3), same=((4, 1e-6), (3, 0.0))):
    runs = {
        "plain": [run_of(value, None) for value in (0.88, 0.92)], "refine": [run_of(0.9, 5.0)] * 2,
        "refine_all": [run_of(reward, kept)] * 2, "refine_positive": [run_of(0.9, 3.0)] * 2,
        "refine_fast": [run_of(0.9, fast)] * 2, "refine_all_fast": [run_of(0.9, 5.0)] * 2,
    }  # fmt: skip
    students = {"opd": run_of(0.0, None, opd), "grpo": run_of(0.0, None, grpo)}
    cell = {"tokens": 300, "same": 1.0}
    times = {"hf": {b: {"seconds": [walls, 2 * walls, walls], **cell} for b in results.WALL},
             "refine": {b: {"seconds": [1.0, 1.0, 5.0], **cell} for b in results.WALL}}  # fmt: skip
    return runs, students, list(same), times


def test_criteria_of_runs_made_up():
    criteria = results.criteria_of(*shown())
    assert all(criterion.met for criterion in criteria.values())
    # 60 tokens take 60 forwards, or one for the prompt and 12; a batch 90 or 30.
    assert criteria["forwards_start"].value == f"{60 / 13:.2f} (3.00)"
    for changes, name in (
        ({"fast": 4.8}, "decay"), ({"kept": 2.9}, "forwards_start"), ({"kept": 2.6}, "forwards_end"),
        # 2 seeds: 12.706 standard errors of 0.02
        ({"reward": 0.64}, "reward"), ({"walls": 2.4}, "wall_4"), ({"walls": 1.3}, "wall_tail"),
        ({"opd": (0.2, 0.34)}, "opd_gain"), ({"grpo": (0.2, 0.4)}, "opd_samples"),
        ({"same": [(9, 0.0), (2, 0.0)]}, "same_samples"), ({"same": [(9, 1e-3), (5, 0.0)]}, "same_samples"),
    ):  # fmt: skip
        assert not results.criteria_of(*shown(**changes))[name].met, name
    assert results.criteria_of(*shown(reward=0.65))["reward"].met


def test_leading_steps_with_the_same_samples(tmp_path):
    for run, texts, loss in (("plain", "abc", 0.5), ("refine", "abd", 0.75)):
        (tmp_path / run / "samples").mkdir(parents=True)
        for step, text in enumerate(texts, 1):
            (tmp_path / run / "samples" / f"{step}.jsonl").write_text(json.dumps({"output": text}) + "\n")
        rows = [{"step": step, "data": {"actor/pg_loss": loss}} for step in (1, 2, 3)]
        (tmp_path / run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert results.same_steps(tmp_path / "plain", tmp_path / "refine") == (2, 0.25)


def test_the_benchmark_has_a_row_per_bound(tmp_path, monkeypatch):
    runs, students, same, times = shown()
    result = {"runs": runs, "students": students, "same_steps": same, "generation": times}
    (tmp_path / "result.json").write_text(json.dumps(result))
    monkeypatch.setenv("REFINE_RL", str(tmp_path))
    monkeypatch.setattr(lossless, "run", list)
    rows = {row.name: row for row in speculative.run()}
    assert rows["refine_wall_16"].value == 3.0 and rows["opd_gain_points"].value == pytest.approx(20)
    assert rows["refine_forwards_ratio_end"].value == pytest.approx(60 / 13)
    assert {name for name in WANTED if name.startswith(("refine_", "opd_"))} <= rows.keys()


def test_the_distribution_test_sees_samples_that_are_not_the_policys(monkeypatch):
    chosen = {name: settings for name, settings in lossless.rollouts(None).items() if settings["name"] == "refine"}
    monkeypatch.setattr(lossless, "rollouts", lambda draft: chosen)
    monkeypatch.setattr(lossless, "SAMPLES", 1500)
    rows = {row.name: row.value for row in lossless.run()}
    assert min(rows["p_value_refine_slide"], rows["p_value_refine_verify"]) >= 0.001 > rows["p_value_lenient"]
    assert all(rows[f"toy_tokens_per_forward_{name}"] > 1 for name in chosen)
    assert {name for name in WANTED if name.startswith("p_value_refine") or name == "p_value_lenient"} <= rows.keys()


def test_p_value_by_hand():
    log_probs = torch.tensor([[1 / 2], [1 / 6], [1 / 6], [1 / 6]]).log()
    numbers = torch.tensor([0] * 1230 + [1] * 390 + [2] * 390 + [3] * 390)
    # 30^2 / 1200 + 3 * 10^2 / 400 = 1.5, of 3 degrees of freedom
    assert lossless.p_value(numbers, log_probs) == pytest.approx(0.68227, abs=1e-4)


def test_a_tail_leaves_answers_of_different_length(tiny_llama, monkeypatch):
    monkeypatch.setattr(generation, "SHORTEST", 2)
    monkeypatch.setattr(generation, "LONGEST", 9)
    monkeypatch.setattr(generation, "CALLS", {"1": 2, "tail": 1})
    table = pd.DataFrame({"instruction": ["q : 1"] * 3, "output": ["a b c", *["a b c d e f g h"] * 2]})
    made = generation.batches_of(table, tiny_llama)
    assert [len(requests) for requests in made.values()] == [1, 2]
    lengths = made["tail"][0].batch["attention_mask"].sum(-1) - 3
    assert (9 - lengths).tolist() == [2, 9]  # with the end token
