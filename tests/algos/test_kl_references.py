"""KL estimators against J. Schulman's definitions (Approximating KL Divergence, 2020), token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.algo_batches import masks, normal, seeds
from tests.helpers.policy_batches import assert_agree, value_and_gradient
from verl.protocol import DataProto
from verl.trainer.ppo.batching import apply_kl_penalty
from verl.trainer.ppo.core_algos import AdaptiveKLController, compute_rewards, kl_penalty, kl_penalty_forward


def k1(d: Tensor) -> Tensor:
    return d


def k2(d: Tensor) -> Tensor:
    return d**2 / 2


def k3(d: Tensor) -> Tensor:
    """r - 1 - log r with r = pi_ref / pi; beyond the definition at most 10, so that no token rules the batch."""
    return min(torch.exp(-d) - 1 + d, torch.full_like(d, 10.0))


REFERENCES = {"kl": k1, "k1": k1, "abs": abs, "mse": k2, "k2": k2, "low_var_kl": k3, "k3": k3}


def reference(name: str, log_prob: Tensor, ref: Tensor) -> Tensor:
    """The estimate of each entry of [B, T], one at a time."""
    differences = zip(log_prob.flatten(), ref.flatten(), strict=True)
    return torch.stack([REFERENCES[name](a - b) for a, b in differences]).reshape(log_prob.shape)


shapes = st.tuples(st.integers(1, 4), st.integers(1, 4))


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=25)
@given(shape=shapes, seed=seeds, scale=st.sampled_from([0.2, 1.0, 2.0]))
def test_estimate_and_gradient_agree_with_the_definition(name, shape, seed, scale):
    log_prob, ref, weights = normal(seed, *shape, scale=scale), normal(seed + 1, *shape), normal(seed + 2, *shape)
    assert_agree(
        lambda x: (kl_penalty(x, ref, name) * weights).sum(),
        lambda x: (reference(name, x, ref) * weights).sum(),
        log_prob,
    )
    torch.testing.assert_close(kl_penalty_forward(log_prob, ref, name), reference(name, log_prob, ref))


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=15)
@given(shape=shapes, seed=seeds)
def test_plus_is_the_estimate_in_value_and_k2_in_gradient(name, shape, seed):
    """A straight-through form, so no difference quotient of its value can be its gradient: d, that of d^2 / 2."""
    log_prob, ref = normal(seed, *shape), normal(seed + 1, *shape)
    got, gradient = value_and_gradient(lambda x: kl_penalty(x, ref, name + "+").sum(), log_prob)
    assert got == pytest.approx(reference(name, log_prob, ref).sum().item(), rel=1e-10, abs=1e-10)
    torch.testing.assert_close(gradient, log_prob - ref, rtol=1e-10, atol=1e-10)


@settings(max_examples=25)
@given(mask=masks(), seed=seeds, name=st.sampled_from(sorted(REFERENCES)), coefficient=st.floats(0.0, 0.5))
def test_reward_is_the_score_less_the_kl_of_each_token(mask, seed, name, coefficient):
    """Section 2.1 of 1909.08593, R = r - beta log(pi / rho), token by token; then eq. 3 and 4 move beta."""
    scores, old, ref = (normal(seed + k, *mask.shape) for k in range(3))
    controller = AdaptiveKLController(coefficient, target_kl=0.3, horizon=50)
    columns = {"token_level_scores": scores, "old_log_probs": old, "ref_log_prob": ref, "response_mask": mask}
    data, metrics = apply_kl_penalty(DataProto.from_dict(columns), controller, name)
    penalty = reference(name, old, ref)
    rows = []
    for i in range(mask.shape[0]):
        ts = [t for t in range(mask.shape[1]) if mask[i, t]]
        for t in range(mask.shape[1]):
            less = coefficient * float(penalty[i, t]) if t in ts else 0.0
            reward = data.batch["token_level_rewards"][i, t].item()
            assert reward == pytest.approx(float(scores[i, t]) - less, abs=1e-12)
        rows.append(sum(float(penalty[i, t]) for t in ts) / len(ts) if ts else 0.0)
    measured = sum(rows) / len(rows)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(measured, rel=1e-10, abs=1e-10)
    error = max(-0.2, min(measured / 0.3 - 1, 0.2))
    assert controller.value == pytest.approx(coefficient * (1 + error * len(rows) / 50), rel=1e-10, abs=1e-12)


@settings(max_examples=10)
@given(shape=shapes, seed=seeds)
def test_compute_rewards_takes_k1_off(shape, seed):
    scores, old, ref = (normal(seed + k, *shape) for k in range(3))
    rewards = compute_rewards(scores, old, ref, 0.3)
    for s, a, b, reward in zip(scores.flatten(), old.flatten(), ref.flatten(), rewards.flatten(), strict=True):
        assert float(reward) == pytest.approx(float(s) - 0.3 * (float(a) - float(b)), rel=1e-12, abs=1e-12)
