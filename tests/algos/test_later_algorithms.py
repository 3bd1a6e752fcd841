"""Estimators, losses and corrections that verl has since 0.7.1, against numbers computed by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from verl.algos import rollout_correction
from verl.algos.advantage import compute_optimal_token_baseline_advantage, estimate_advantages
from verl.algos.aggregation import StepCounts
from verl.algos.policy_loss import LossInputs, get_loss_fn, value_loss
from verl.config.actor import ActorConfig, PolicyLossConfig
from verl.config.algorithm import AlgoConfig, RolloutCorrectionConfig

MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def log(*ratios):
    return torch.tensor(ratios).log()


@pytest.mark.parametrize(
    ("option", "threshold", "kept"),
    [
        # Ratios of the tokens: 1.2, 0.5, 1.0 and 0.9, 1.1. log 0.5 = -0.693.
        ("token_k1", "0.6_1.4", [[1, 0, 1], [1, 1, 0]]),
        ("token_k1", 1.5, [[1, 0, 1], [1, 1, 0]]),  # the lower bound is 1 / 1.5
        ("token_k2", 0.2, [[1, 0, 1], [1, 1, 0]]),  # 0.693^2 / 2 = 0.240
        ("token_k3", 0.2, [[1, 1, 1], [1, 1, 0]]),  # 0.5 - 1 + 0.693 = 0.193
        ("token_k3", 0.19, [[1, 0, 1], [1, 1, 0]]),
        ("seq_sum_k1", "0.7_1.4", [[0, 0, 0], [1, 1, 0]]),  # 1.2 * 0.5 = 0.6; 0.99
        ("seq_mean_k1", "0.8_1.2", [[1, 1, 1], [1, 1, 0]]),  # 0.6^(1/3) = 0.843
        ("seq_mean_k1", "0.85_1.2", [[0, 0, 0], [1, 1, 0]]),
        ("seq_sum_k2", 0.25, [[0, 0, 0], [1, 1, 0]]),  # 0.182^2 / 2 + 0.240 = 0.257
        ("seq_mean_k2", 0.1, [[1, 1, 1], [1, 1, 0]]),  # 0.0856
        ("seq_sum_k3", 0.22, [[1, 1, 1], [1, 1, 0]]),  # (1.2 - 1 - 0.182) + 0.193 = 0.211
        ("seq_mean_k3", 0.07, [[0, 0, 0], [1, 1, 0]]),  # 0.0703
        ("seq_max_k2", 0.2, [[0, 0, 0], [1, 1, 0]]),
        ("seq_max_k3", 0.2, [[1, 1, 1], [1, 1, 0]]),
        ("token_k1,seq_max_k2", "0.95_1.3,0.2", [[0, 0, 0], [0, 1, 0]]),
        ("token_k2, seq_max_k3", 0.2, [[1, 0, 1], [1, 1, 0]]),
    ],
)
def test_rejection(option, threshold, kept):
    ratios = torch.tensor([[1.2, 0.5, 1.0], [0.9, 1.1, 9.0]])
    mask, metrics = rollout_correction.compute_rollout_rejection_mask(ratios.log(), MASK, option, threshold)
    assert mask.tolist() == kept
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(1 - sum(map(sum, kept)) / 5)


def test_each_of_several_rejections_has_metrics():
    ratios = log([1.0, 2.0, 1.0], [1.0, 1.0, 1.0])
    _, metrics = rollout_correction.compute_rollout_rejection_mask(ratios, MASK, "token_k1,seq_max_k2", "1.5,1")
    assert metrics["rollout_rs_max"] == pytest.approx(2.0)
    assert metrics["rollout_rs_seq_max_k2_max"] == pytest.approx(math.log(2) ** 2 / 2)


def test_ratios_outside_of_two_bounds_have_no_weight():
    ratios = torch.tensor([[0.4, 2.0, 6.0], [1.0, 0.5, 1.0]])
    weights, _ = rollout_correction.compute_rollout_correction_weights(ratios.log(), MASK, "token", "0.5_5.0")
    assert torch.allclose(weights, torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.5, 0.0]]))
    weights, _ = rollout_correction.compute_rollout_correction_weights(ratios.log(), MASK, "token", "5")
    assert torch.allclose(weights, torch.tensor([[0.4, 2.0, 5.0], [1.0, 0.5, 0.0]]))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rollout_is_threshold": "5_0.5"}, "rollout_is_threshold"),
        ({"rollout_is_threshold": "high"}, "0.5_5.0"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1.0}, "token_k1"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 1.0}, "seq_max_k2"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2"}, "upper bound only"),
        ({"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"}, "3 bounds for 2"),
    ],
)
def test_wrong_bounds_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        RolloutCorrectionConfig(**settings)


def test_presets():
    assert RolloutCorrectionConfig.disabled().rollout_is is None
    assert RolloutCorrectionConfig.bypass_pg_is(3.0).loss_type == "reinforce"
    config = RolloutCorrectionConfig.geo_rs_seq_tis()
    assert (config.rollout_is, config.rollout_rs, config.rollout_rs_threshold) == ("sequence", "geometric", 1.001)
    config = RolloutCorrectionConfig.decoupled_token_icepop()
    assert (config.rollout_is, config.rollout_is_threshold) == ("token", "0.5_5.0")
    config = RolloutCorrectionConfig.bypass_ppo_clip_k3_rs()
    assert (config.rollout_rs, config.rollout_rs_threshold, config.bypass_mode) == ("seq_mean_k3", 0.01, True)
    settings = rollout_correction.settings_of(RolloutCorrectionConfig.decoupled_geo_rs_token_tis())
    assert settings["rollout_rs_threshold"] == "0.999_1.001"
    for name in ("bypass_pg_token_icepop", "decoupled_geo_rs_seq_tis", "bypass_pg_geo_rs", "bypass_pg_geo_rs_token_tis",
                 "decoupled_k3_rs", "decoupled_k3_rs_seq_tis", "decoupled_k3_rs_token_tis"):  # fmt: skip
        getattr(RolloutCorrectionConfig, name)()


def loss_of(name, old, new, advantages, **settings):
    """(loss with token-sum, gradient by log_prob) of tokens with these probabilities."""
    policy = {key: settings.pop(key) for key in ("dro_beta",) if key in settings}
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, loss_agg_mode="token-sum", policy_loss=PolicyLossConfig(**policy), **settings
    )
    log_prob = torch.tensor([new]).log().requires_grad_()
    inputs = LossInputs(log_prob, torch.tensor([old]).log(), torch.tensor([advantages]), torch.ones(1, len(old)))
    loss, metrics = get_loss_fn(name)(inputs, config)
    loss.backward()
    return loss.item(), log_prob.grad[0].tolist(), metrics


def test_dppo_tv_keeps_tokens_of_low_probability_and_stops_those_far_from_the_old_policy():
    old, new = [0.01, 0.5, 0.5, 0.5, 0.5], [0.05, 0.8, 0.2, 0.2, 0.8]
    advantages = [1.0, 1.0, 1.0, -1.0, -1.0]
    # Differences of 0.04 and four of 0.3, the bound is 0.2: the second moves up with A > 0, the fourth down with A < 0.
    loss, gradient, metrics = loss_of("dppo_tv", old, new, advantages, clip_ratio=0.2, clip_ratio_c=4.0)
    ratios = [4.0, 0.0, 0.4, 0.0, 1.6]  # r = 5 is cut to 4
    assert gradient == pytest.approx([-r * a for r, a in zip(ratios, advantages, strict=True)])
    assert loss == pytest.approx(sum(-r * a * math.log(p) for r, a, p in zip(ratios, advantages, new, strict=True)))
    assert metrics["actor/pg_clipfrac"] == pytest.approx(0.4)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(0.2)


def test_dppo_kl_compares_two_outcomes():
    # p = 0.5, q = 0.8: 0.5 log(0.5 / 0.8) + 0.5 log(0.5 / 0.2) = 0.2231.
    for bound, weight in ((0.22, 0.0), (0.23, 1.6)):
        _, gradient, _ = loss_of("dppo_kl", [0.5], [0.8], [1.0], clip_ratio=bound)
        assert gradient == pytest.approx([-weight])
    loss_of("dppo_kl", [1.0], [0.5], [1.0])  # no division by the probability of other tokens


def test_dro_is_a_policy_gradient_with_a_quadratic_penalty():
    loss, gradient, _ = loss_of("dro", [0.5, 0.5], [0.25, 0.5], [2.0, -1.0], dro_beta=0.1)
    far = math.log(0.5)
    assert loss == pytest.approx(-(2 * math.log(0.25) - 0.05 * far**2) + math.log(0.5))
    assert gradient == pytest.approx([-2 + 0.1 * far, 1.0])
    with pytest.raises(ValueError, match="dro_beta"):
        PolicyLossConfig(loss_mode="dro")


def test_gdpo_normalises_each_reward_by_itself():
    mask = torch.tensor([[1, 0], [1, 1], [1, 1], [1, 0]])
    config = AlgoConfig(adv_estimator="gdpo", gdpo_reward_keys=["right", "form"], gdpo_reward_weights=[1.0, 0.5])
    rewards = {"right": [0.0, 1.0, 0.0, 0.0], "form": [0.0, 10.0, 30.0, 10.0]}
    inputs = {"token_level_rewards": torch.zeros(4, 2), "response_mask": mask, "index": ["a", "a", "b", "b"],
              "config": config, "non_tensor_batch": rewards}  # fmt: skip
    advantages, _ = estimate_advantages("gdpo", inputs)
    # Of two samples with different rewards the normalised ones are -+1 / sqrt(2).
    per_sample = torch.tensor([-1.5, 1.5, 0.5, -0.5]) / math.sqrt(2)
    tokens = per_sample[torch.tensor([0, 1, 1, 2, 2, 3])]
    whitened = (tokens - tokens.mean()) / tokens.std()
    expected = torch.zeros(4, 2).masked_scatter(mask.bool(), whitened)
    assert torch.allclose(advantages, expected, atol=1e-4)
    with pytest.raises(ValueError, match="'form'"):
        estimate_advantages("gdpo", {**inputs, "non_tensor_batch": {"right": rewards["right"]}})
    with pytest.raises(ValueError, match="row 1 is nan"):
        estimate_advantages("gdpo", {**inputs, "non_tensor_batch": rewards | {"form": [0.0, math.nan, 1.0, 1.0]}})


@pytest.mark.parametrize(
    "settings", [{"gdpo_reward_keys": None}, {"gdpo_reward_keys": ["a"], "gdpo_reward_weights": [1.0, 2.0]}]
)
def test_gdpo_needs_keys_and_as_many_weights(settings):
    with pytest.raises(ValueError, match="gdpo_reward_keys"):
        AlgoConfig(adv_estimator="gdpo", **settings)


def optimal_baseline(name, rewards, mask, probabilities, squares, index, **more):
    inputs = {"token_level_rewards": torch.tensor(rewards), "response_mask": torch.tensor(mask), "index": index,
              "old_log_probs": torch.tensor(probabilities).log(), "sum_pi_squared": torch.tensor(squares)}  # fmt: skip
    return estimate_advantages(name, inputs | more)[0]


def test_the_optimal_token_baseline_weighs_returns_by_energy():
    # 1 - 2 p + s: first row 0.5, 1.0 (sums 0.5, 1.5), second row 1.0 (sum 1.0).
    advantages = optimal_baseline(
        "optimal_token_baseline", [[0.0, 3.0], [1.0, 0.0]], [[1, 1], [1, 0]],
        [[0.5, 0.25], [0.25, 1.0]], [[0.5, 0.5], [0.5, 1.0]], ["a", "a"],
    )  # fmt: skip
    first = (0.5 * 3 + 1.0 * 1) / 1.5
    assert torch.allclose(advantages, torch.tensor([[3 - first, 3.0], [1 - first, 0.0]]), atol=1e-6)


def test_without_a_rule_for_its_end_the_longest_sample_is_its_own_baseline():
    rewards, mask = torch.tensor([[0.0, 3.0], [1.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    squares = torch.full((2, 2), 0.5)
    options = (rewards, mask, ["a", "a"], squares.log(), squares)
    advantages, _ = compute_optimal_token_baseline_advantage(*options, handle_zero_tail=False)
    assert advantages[0, 1] == pytest.approx(0.0, abs=1e-6)


def test_a_tools_answer_is_stepped_over():
    # The tool's token in the middle of the first row neither adds energy nor ends the sample.
    advantages = optimal_baseline(
        "tir_optimal_token_baseline", [[0.0, 0.0, 2.0], [0.0, 0.0, 0.0]], [[1, 0, 1], [1, 1, 1]],
        [[0.5] * 3] * 2, [[0.5] * 3] * 2, ["a", "a"],
    )  # fmt: skip
    # Energies 0.5, 0.5, 1.0 and 0.5, 1.0, 1.5; returns 2 and 0.
    baselines = [0.5 * 2 / 1.0, 0.5 * 2 / 1.5, 1.0 * 2 / 2.5]
    assert advantages[0].tolist() == pytest.approx([2 - baselines[0], 0, 2 - baselines[2]], abs=1e-6)
    assert advantages[1].tolist() == pytest.approx([-b for b in baselines], abs=1e-6)


def test_importance_weights_enter_squared():
    weights = torch.tensor([[2.0], [1.0]])
    advantages = optimal_baseline(
        "optimal_token_baseline", [[1.0], [0.0]], [[1], [1]], [[0.5], [0.5]], [[0.5], [0.5]], ["a", "a"],
        rollout_is_weights=weights,
    )  # fmt: skip
    assert advantages.flatten().tolist() == pytest.approx([0.2, -0.8])


def test_the_critic_has_a_divisor_of_its_own():
    config = SimpleNamespace(cliprange_value=10.0, loss_agg_mode="seq-mean-token-sum-norm")
    ones, mask = torch.ones(1, 2), torch.ones(1, 2)
    loss, _ = value_loss(ones, torch.zeros(1, 2), ones, mask, StepCounts(loss_scale_factor=4), config)
    assert loss == pytest.approx(0.5 * 2 / 4)
