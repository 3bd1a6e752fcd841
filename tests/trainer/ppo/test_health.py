"""Synthetic runs with one defect each: the run's health reports that one, and nothing about a run without one."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.configs import compose_ppo
from tests.helpers.logs import logged
from verl.protocol import DataProto
from verl.protocol.serialization import object_array
from verl.report.health import RULES, best_of, best_of_groups
from verl.report.page import collect_series, health_rows, write_report
from verl.reward.rows import EXTRAS
from verl.trainer.ppo.health import RunHealth
from verl.trainer.ppo.metric_utils import cut_answers

PROMPTS, N, P, R, STEPS = 8, 4, 5, 16, 60


def made_step(step, defect):
    """(batch, metrics) of one step of a run; `defect` starts at step 30."""
    g = torch.Generator().manual_seed(step)
    rows, late = PROMPTS * N, step >= 30
    lengths = torch.randint(9, R, (rows,), generator=g)
    if defect == "truncated" and late:
        lengths[: rows * 3 // 4] = R
    mask = (torch.arange(R)[None] < lengths[:, None]).long()
    responses = torch.randint(5, 500, (rows, R), generator=g)
    scores = torch.randint(0, 2, (rows,), generator=g).float()
    if defect == "groups_without_variance" and late:
        scores = (torch.arange(rows) // N % 2).float()
    if defect == "repeated_answers_reward" and late:
        responses[scores > 0] = torch.arange(R) + 7
        lengths[scores > 0] = 12
        mask = (torch.arange(R)[None] < lengths[:, None]).long()
    right = torch.rand(rows, generator=g) < 0.5
    if defect == "pass_change" and late:  # samples of a prompt are all right or all wrong
        right = torch.arange(rows) // N % 2 == 0
    extras = object_array([{"acc": float(value)} for value in right])
    token_scores = torch.zeros(rows, R)
    token_scores[:, 0] = scores
    old = -torch.rand(rows, R, generator=g) * 2
    noise = torch.randn(rows, R, generator=g) * 0.01
    rollout = old + noise
    if late and defect == "first_ratio":  # renormalised over the kept tokens by top_p=0.9
        rollout = old + 0.1
    if late and defect == "outside_clip_range":
        rollout = torch.where(torch.rand(rows, R, generator=g) < 0.04, old + 0.4, rollout)
        rollout = torch.where(torch.rand(rows, R, generator=g) < 0.04, old - 0.4, rollout)
    if late and defect == "effective_sample_size":  # every 48th token has a ratio of 10, the others of 0.81
        rollout = old + 0.214
        rollout[::4, 0] = old[::4, 0] - math.log(10)
    reference = old + torch.randn(rows, R, generator=g) * (1.5 if late and defect == "kl_ref_k3" else 0.1)
    prompt_mask = torch.ones(rows, P, dtype=torch.long)
    batch = DataProto.from_dict(
        {"responses": responses, "response_mask": mask, "attention_mask": torch.cat([prompt_mask, mask], 1),
         "token_level_scores": token_scores, "old_log_probs": old, "rollout_log_probs": rollout,
         "ref_log_prob": reference},
        {"uid": np.array([str(i // N) for i in range(rows)], dtype=object), EXTRAS: extras},
    )  # fmt: skip
    metrics = {
        "training/weights_version": 28 if defect == "staleness" and late else step - 1,
        "actor/pg_loss": 0.1, "actor/entropy": 1 + 0.1 * math.sin(step), "actor/grad_norm": 1 + 0.3 * math.sin(step),
        "response_length/mean": mask.sum(1).float().mean().item(), "critic/score/mean": scores.mean().item(),
        "response_length/clip_ratio": (mask.sum(1) == R).float().mean().item(),
    }  # fmt: skip
    metrics["health/kept_mass"] = 0.5 if late and defect == "kept_mass" else 0.95
    if late and defect == "entropy_ratio":
        metrics["actor/entropy"] = 0.01
    if late and defect == "length_without_reward":
        metrics["response_length/mean"] *= 3
    if late and defect == "grad_norm_ratio" and step == 31:
        metrics["actor/grad_norm"] = 40.0
    return batch, metrics


def new_health(*overrides):
    return RunHealth(compose_ppo("trainer.device=cpu", "actor_rollout_ref.rollout.name=hf", *overrides))


def run_of(defect):
    """(warnings, rows of metrics) of a synthetic run."""
    health, rows = new_health(), []
    with logged() as lines:
        for step in range(1, STEPS + 1):
            batch, metrics = made_step(step, defect)
            rows.append({"step": step, "data": metrics | health.measure(batch, step, metrics)})
    return lines, rows


@pytest.mark.parametrize("defect", [None, *(rule.metric.removeprefix("health/") for rule in RULES)])
def test_a_run_with_one_defect_gets_that_warning(defect, tmp_path):
    warnings, rows = run_of(defect)
    values = {line.split("=")[0].split()[-1].removeprefix("health/") for line in warnings}
    assert values == ({defect} if defect else set())
    assert all("\n" not in line and line.endswith(".") for line in warnings)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = {row.name: row.broken for row in health_rows(collect_series(rows)) if row.broken}
    assert list(table) == ([defect.replace("_", " ")] if defect else [])
    page = write_report(tmp_path).read_text()
    assert page.count(">warning<") == len(table) and page.count(">ok<") == len(RULES) - len(table)


def test_answers_without_any_reward_are_described_once():
    """Of 4 answers 3 are cut; the rule finds a number in 1 of them; 2 conversations called the tool."""
    texts = ["so 7", "#### 7", "so <b>", "8"]
    rows = [[ord(c) for c in text] for text in texts]
    ids = torch.tensor([row + [0] * (6 - len(row)) for row in rows])
    batch = DataProto.from_dict(
        {"prompts": torch.full((4, 1), 63), "responses": ids, "response_mask": (ids > 0).long(),
         "attention_mask": torch.cat([torch.ones(4, 1, dtype=torch.long), (ids > 0).long()], 1),
         "token_level_scores": torch.zeros(4, 6)},
        {"uid": np.array(["a", "a", "b", "b"]), "data_source": np.array(["openai/gsm8k"] * 4),
         "tool_call_counts": np.array([0, 1, 0, 2]), "failed_tool_calls": np.array([0, 1, 0, 1]),
         "end_reason": np.array(["length", "stop", "length", "length"], dtype=object)},
    )  # fmt: skip
    decode = lambda rows, skip_special_tokens: ["".join(map(chr, row.tolist())) for row in rows]  # noqa: E731
    tokenizer = SimpleNamespace(
        batch_decode=decode, decode=lambda row, skip_special_tokens: "".join(map(chr, map(int, row)))
    )
    tools = "actor_rollout_ref.rollout.multi_turn.function_tool_path=tools.py"
    known = {"response_length/clip_ratio": cut_answers(batch).float().mean().item(), "response_length/mean": 4.0,
             "critic/score/mean": 0.0}  # fmt: skip

    assert new_health(tools).measure(batch, 1, known)["health/failed_tool_calls"] == pytest.approx(2 / 3)
    mixed = batch.select()
    mixed.non_tensor_batch |= {"tool_call_counts": np.array([None, 1, 0, 2], dtype=object),
                               "failed_tool_calls": np.array([None, 1, 0, 0], dtype=object)}  # fmt: skip
    assert new_health(tools).measure(mixed, 1, known)["health/failed_tool_calls"] == pytest.approx(1 / 3)

    def said(health, batch):
        with logged() as lines:
            for step in (1, 2):
                health.explain_no_reward(batch, tokenizer, step)
        return [line for line in lines if "nothing can be learned" in line]

    assert said(new_health(tools), batch) == [
        "step 1: all 4 samples have the reward 0, from which nothing can be learned. 75% of the answers were cut at a "
        "limit of tokens; the scorer found no answer to compare in 75%; 50% called no tool, although tools are given. "
        "One answer: 'so 7'"
    ]
    assert "tool" not in said(new_health(), batch)[0]
    told = batch.select(deepcopy=True)
    told.batch["response_mask"][1, -2:] = 0  # a tool wrote the number: the rule does not see it
    assert "no answer to compare in 100%" in said(new_health(), told)[0]
    assert "no answer to compare in 75%" in said(new_health("reward_model.judged_text=conversation"), told)[0]
    own = said(new_health("custom_reward_function.path=own.py"), batch)[0]
    assert "the scorer" not in own  # a function of one's own: it is not known what it looks for
    batch.batch["token_level_scores"][0, 0] = 1.0
    assert said(new_health(tools), batch) == []


def test_what_a_run_does_not_compute_is_not_measured():
    health = new_health()
    batch, metrics = made_step(1, None)
    batch.pop(["old_log_probs", "rollout_log_probs", "ref_log_prob"], [EXTRAS])
    for name in ("actor/entropy", "actor/grad_norm"):
        del metrics[name]
    values = health.measure(batch, 1, metrics)
    assert set(values) == {f"health/{name}" for name in ("groups_without_variance", "best@1", "best@2", "best@4",
                                                        "truncated", "repeated_answers_reward")}  # fmt: skip


@pytest.mark.parametrize("key", ["actor_rollout_ref.actor.use_rollout_log_probs",
                                 "algorithm.rollout_correction.bypass_mode"])  # fmt: skip
def test_a_rollout_s_log_probs_are_not_compared_with_themselves(key):
    batch, metrics = made_step(1, None)
    health = new_health(f"{key}=true", "actor_rollout_ref.rollout.calculate_log_probs=true")
    values = health.measure(batch, 1, metrics)
    assert not {"health/first_ratio", "health/outside_clip_range", "health/effective_sample_size"} & set(values)


def test_best_of_k_is_the_mean_over_all_subsets():
    generator = np.random.default_rng(0)
    for n in (1, 2, 5, 7):
        values = generator.normal(size=(3, n)).round(1)  # with ties
        for k in range(1, n + 1):
            subsets = [row[list(chosen)].max() for row in values for chosen in itertools.combinations(range(n), k)]
            assert best_of(values, k).mean() == pytest.approx(np.mean(subsets))
    with pytest.raises(ValueError, match="best_of 3 of 2 samples"):
        best_of(np.zeros(2), 3)


def test_pass_at_k_has_its_closed_form_and_no_bias():
    n, c = 10, 3
    right = np.array([1] * c + [0] * (n - c))
    for k in (1, 2, 5, 8, 10):
        expected = 1 - math.comb(n - c, k) / math.comb(n, k)
        assert best_of(right, k) == pytest.approx(expected)
    draws = np.random.default_rng(1).random((20_000, n)) < 0.2  # independent samples that are right with p = 0.2
    assert best_of(draws, 4).mean() == pytest.approx(1 - 0.8**4, abs=5e-3)
    taken = np.random.default_rng(2).integers(n, size=(20_000, 4))  # with replacement: biased
    assert np.take_along_axis(draws, taken, 1).max(1).mean() < 1 - 0.8**4 - 0.05


def test_groups_that_lost_samples_count_where_they_are_large_enough():
    assert best_of_groups([np.array([0, 1.0]), np.array([0.0]), np.array([1, 1, 0.0])]) == pytest.approx(
        {1: (0.5 + 0 + 2 / 3) / 3, 2: 1.0, 3: 1.0}
    )
    assert best_of_groups([]) == {}


def test_pass_at_k_needs_the_reward_to_say_what_is_right():
    health = new_health()
    batch, metrics = made_step(1, None)
    without = batch.select_idxs(np.arange(len(batch)))
    without.non_tensor_batch.pop(EXTRAS)
    assert not [name for name in health.measure(without, 1, metrics) if "pass" in name]
    batch.non_tensor_batch[EXTRAS] = object_array([{"acc": float(i % N == 0)} for i in range(PROMPTS * N)])
    values = health.measure(batch, 1, metrics)
    assert [values[f"health/pass@{k}"] for k in (1, 2, 4)] == pytest.approx([0.25, 0.5, 1.0])


def test_a_warning_is_given_again_after_a_while():
    health = new_health()
    with logged() as lines:
        for step in range(1, 121):
            health._warn(step, {"health/staleness": 1.0})
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 51", "step 101"]
