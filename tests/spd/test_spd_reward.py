"""The reward of a judged block, by hand: four scenarios, nothing accepted, each option."""

import pytest

from recipe.spd.reward import compute_score, compute_score_batch, leading_matches
from recipe.spd.settings import SPDRewardConfig, reward_config
from verl.reward.rules import default_compute_score

COEFFICIENTS = {"alpha": 0.5, "penalty_break": -7.0, "useless": -0.25, "correct_base": 3.0}


def info(accepted, hybrid, baseline, **extra):
    return {
        "index": 0, "effective_len": accepted, "is_correct_hybrid": hybrid, "is_correct_baseline": baseline,
        "draft_ids": [1, 2, 3, 4], "target_ids": [1, 9, 3, 9, 5], **extra,
    }  # fmt: skip


def score(*args, **kwargs):
    settings = {**COEFFICIENTS, **{k: kwargs.pop(k) for k in list(kwargs) if k in SPDRewardConfig.__annotations__}}
    return compute_score("spd_scorer", "", "22", info(*args, **kwargs), **settings)


@pytest.mark.parametrize(
    "accepted, hybrid, baseline, expected, scenario",
    [
        (4, 1, 1, 2.0, "A"),  # 0.5 * 4
        (4, 0, 1, -7.0, "B"),
        (4, 0, 0, -0.25, "C"),
        (4, 1, 0, 5.0, "D"),  # 3 + 0.5 * 4
        (0, 1, 1, 0.0, "zero"),
        (0, 0, 0, 0.0, "zero"),
    ],
)
def test_scenarios_by_hand(accepted, hybrid, baseline, expected, scenario):
    got = score(accepted, hybrid, baseline)
    assert got["score"] == expected
    assert [name for name in "A B C D zero".split() if got[f"scenario_{name}"]] == [scenario]
    assert got["accepted_len"] == accepted and got["acc"] == hybrid


def test_gain_counts_only_what_exact_match_would_not_accept():
    assert leading_matches([1, 2, 3, 4], [1, 9, 3, 9, 5]) == 1
    assert score(4, 1, 1, length="gain")["score"] == 1.5  # 0.5 * (4 - 1)
    assert score(1, 1, 1, length="gain")["score"] == 0.0
    assert score(3, 1, 0, length="gain")["score"] == 4.0  # 3 + 0.5 * 2


def test_length_penalty_costs_right_answers_that_grew():
    lengths = {"hybrid_length": 15, "baseline_length": 10}
    assert score(4, 1, 1, length_penalty=2.0, **lengths)["score"] == 2.0 - 2.0 * 5 / 10
    assert score(4, 0, 1, length_penalty=2.0, **lengths)["score"] == -7.0  # a wrong answer pays no more
    assert score(4, 1, 1, length_penalty=2.0, hybrid_length=8, baseline_length=10)["score"] == 2.0
    at_once = {"hybrid_length": 3, "baseline_length": 0}  # the target would have ended there
    assert score(4, 1, 1, length_penalty=2.0, **at_once)["score"] == 2.0 - 2.0 * 3
    with pytest.raises(ValueError, match="baseline_length=None.*set actor_rollout_ref.rollout.name=spd, or length"):
        score(4, 1, 1, length_penalty=2.0, hybrid_length=8)


def test_environment_wins_over_the_config(monkeypatch):
    for name, value in (("ALPHA", "1"), ("PENALTY_BREAK", "-2"), ("USELESS", "-3"), ("CORRECT_BASE", "4")):
        monkeypatch.setenv(f"REWARD_{name}", value)
    assert [score(2, h, t)["score"] for h, t in ((1, 1), (0, 1), (0, 0), (1, 0))] == [2.0, -2.0, -3.0, 6.0]
    monkeypatch.setenv("REWARD_ALPHA", "much")
    with pytest.raises(ValueError, match="REWARD_ALPHA='much' is not a number"):
        score(2, 1, 1)


def test_batch_form_scores_each_row_alike_and_names_the_bad_one():
    rows = [info(4, 1, 1), info(4, 0, 1)]
    got = compute_score_batch(["spd_scorer"] * 2, ["", ""], ["1", "1"], rows, settings=COEFFICIENTS)
    assert [row["score"] for row in got] == [2.0, -7.0]
    with pytest.raises(ValueError, match="row 1 .*is_correct_hybrid"):
        compute_score_batch(["spd_scorer"] * 2, ["", ""], ["1", "1"], [rows[0], info(4, None, 1)], COEFFICIENTS)


READ = ["effective_len", "is_correct_hybrid", "is_correct_baseline", "draft_ids", "target_ids"]


@pytest.mark.parametrize("name", READ)
def test_a_value_that_is_missing_or_null_is_named_with_its_row(name):
    row, settings = info(4, 1, 1), COEFFICIENTS | {"length": "gain"}
    absent = {key: value for key, value in row.items() if key != name}
    for wrong, state in ((row | {name: None}, "null"), (absent, "missing")):
        message = rf"row 1 .*extra_info\.{name} is {state}; there are: index, .* set actor_rollout_ref.rollout.name=spd"
        with pytest.raises(ValueError, match=message):
            compute_score_batch(["spd_scorer"] * 2, ["", ""], ["1", "1"], [row, wrong], settings)


def test_a_misspelt_coefficient_is_refused():
    with pytest.raises(ValueError, match="spd.reward.alhpa is unknown.*'alpha'"):
        reward_config({"alhpa": 1.0})
    with pytest.raises(ValueError, match="spd.reward.length='gian'"):
        reward_config({"length": "gian"})


def test_the_default_reward_sends_the_data_source_here():
    assert default_compute_score("spd_scorer", "", "22", info(4, 1, 1), **COEFFICIENTS)["score"] == 2.0
