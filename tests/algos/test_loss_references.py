"""Every policy loss and the value loss against its paper's formula, written out token by token, gradients included.

A reference is a function (batch, log_prob, frozen): what the paper holds still (a stop-gradient sg, or a rule that
chooses tokens) is computed from `frozen`, the rest from `log_prob`; the loss is its value at frozen = log_prob, and its
gradient that with respect to `log_prob` alone, by autograd through the reference. Kinks of clips are avoided.

Not covered: losses in float32, and the sums over ranks and micro-batches (test_losses.py).
"""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.algo_batches import counted, junk_outside, masks, normal, seeds
from tests.helpers.policy_batches import Batch, aggregated, assert_agree, away_from, batches, clip, value_and_gradient
from verl.algos.aggregation import StepCounts
from verl.trainer.ppo.core_algos import LOSS_AGG_MODES, agg_loss, compute_entropy_loss, compute_value_loss
from verl.workers.config import ActorConfig, PolicyLossConfig


def ratio(batch: Batch, log_prob: Tensor, i: int, t: int) -> Tensor:
    return torch.exp(log_prob[i, t] - batch.old[i, t])


def ppo_objective(r, advantage, config):
    """Eq. 7 of 1707.06347, with the two bounds of DAPO (2503.14476, "clip-higher")."""
    return min(r * advantage, clip(r, 1 - config.clip_ratio_low, 1 + config.clip_ratio_high) * advantage)


def vanilla(batch: Batch, log_prob: Tensor, frozen: Tensor) -> Tensor:
    """PPO, and for A < 0 the dual clip of 1912.09729: max(min(r A, clip(r) A), c A)."""

    def rule(i, t):
        advantage = batch.advantages[i, t]
        objective = ppo_objective(ratio(batch, log_prob, i, t), advantage, batch.config)
        return -(max(objective, batch.config.clip_ratio_c * advantage) if advantage < 0 else objective)

    return batch.aggregated(batch.each(rule))


def gspo(batch: Batch, log_prob: Tensor, frozen: Tensor) -> Tensor:
    """GSPO-token, eq. 13 and 14 of 2507.18071: s_it = sg(s_i) pi_t / sg(pi_t), s_i the length-normalised ratio (eq. 7);
    a mean over answers of token means."""

    def rule(i, t):
        ts = batch.positions[i]
        s = math.exp(sum(float(frozen[i, u] - batch.old[i, u]) for u in ts) / len(ts))
        return -ppo_objective(s * torch.exp(log_prob[i, t] - frozen[i, t]), batch.advantages[i, t], batch.config)

    return batch.aggregated(batch.each(rule), "seq-mean-token-mean")


def sapo(batch: Batch, log_prob: Tensor, frozen: Tensor) -> Tensor:
    """The objective of 2511.20347: f(r) = 4 / tau * sigmoid(tau (r - 1)), tau_pos for A > 0 else tau_neg; nothing is
    held still, the gate is differentiated; a mean over answers of token means."""

    def rule(i, t):
        advantage = batch.advantages[i, t]
        tau = batch.config.tau_pos if advantage > 0 else batch.config.tau_neg
        return -4 / tau / (1 + torch.exp(-tau * (ratio(batch, log_prob, i, t) - 1))) * advantage

    return batch.aggregated(batch.each(rule), "seq-mean-token-mean")


def gpg(batch: Batch, log_prob: Tensor, frozen: Tensor) -> Tensor:
    """2504.02546: -A log pi."""
    return batch.aggregated(batch.each(lambda i, t: -batch.advantages[i, t] * log_prob[i, t]))


def cispo(batch: Batch, log_prob: Tensor, frozen: Tensor) -> Tensor:
    """Eq. 4 and 5 of 2506.13585: -sg(clip(r)) A log pi."""

    def rule(i, t):
        low, high = 1 - batch.config.clip_ratio_low, 1 + batch.config.clip_ratio_high
        return -clip(float(ratio(batch, frozen, i, t)), low, high) * batch.advantages[i, t] * log_prob[i, t]

    return batch.aggregated(batch.each(rule))


def geo_mean(batch: Batch, log_prob: Tensor, frozen: Tensor) -> Tensor:
    """GMPO, 2507.20673, one advantage an answer: (prod_t |min(r_t A, clip(r_t, e^-low, e^high) A)|)^(1/n) sgn(A)."""
    losses = []
    for i, ts in enumerate(batch.positions):
        advantage = batch.advantages[i, ts[0]] if ts else 0.0
        product = log_prob.new_ones(())
        for t in ts if advantage != 0 else []:
            r = ratio(batch, log_prob, i, t)
            bounds = math.exp(-batch.config.clip_ratio_low), math.exp(batch.config.clip_ratio_high)
            product = product * abs(min(r * advantage, clip(r, *bounds) * advantage))
        objective = product ** (1 / len(ts)) * advantage.sign() if ts and advantage != 0 else log_prob.new_zeros(())
        weight = 1.0 if batch.weights is None else batch.weights[i, 0]
        losses.append([-objective * weight] if ts else [])
    return aggregated(losses, "token-mean", 1)


def covariances(batch: Batch, frozen: Tensor) -> dict:
    """Cov of 2505.22617: (A - mean A) (log pi - mean log pi) of each token, means over the batch's tokens."""
    n = len(batch.places)
    mean_advantage = sum(float(batch.advantages[place]) for place in batch.places) / n
    mean_log_prob = sum(float(frozen[place]) for place in batch.places) / n
    return {p: (float(batch.advantages[p]) - mean_advantage) * (float(frozen[p]) - mean_log_prob) for p in batch.places}


def highest(batch: Batch, frozen: Tensor) -> set:
    """The k N tokens of highest covariance, one at least; a batch where the cut parts equals is not looked at."""
    if not batch.places:
        return set()
    covariance = covariances(batch, frozen)
    many = max(1, int(batch.config.policy_loss.kl_cov_ratio * len(batch.places)))
    ranked = sorted(batch.places, key=lambda place: -covariance[place])
    assume(len(ranked) == many or covariance[ranked[many - 1]] - covariance[ranked[many]] > 1e-4)
    return set(ranked[:many])


def kl_cov(batch: Batch, log_prob: Tensor, frozen: Tensor) -> Tensor:
    """KL-Cov of 2505.22617: -r A, plus beta times the distance from the old policy (here |log r|) on the tokens of
    highest covariance; the choice is held still."""
    chosen = highest(batch, frozen)

    def rule(i, t):
        far = abs(log_prob[i, t] - batch.old[i, t]) if (i, t) in chosen else 0.0
        return -ratio(batch, log_prob, i, t) * batch.advantages[i, t] + batch.config.policy_loss.ppo_kl_coef * far

    return batch.aggregated(batch.each(rule))


REFERENCES = {"vanilla": vanilla, "gspo": gspo, "sapo": sapo, "gpg": gpg, "cispo": cispo, "geo_mean": geo_mean,
              "kl_cov": kl_cov}  # fmt: skip


def batches_of(name: str):
    return batches(row_advantages=True, row_weights=True) if name == "geo_mean" else batches()


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=20)
@given(data=st.data())
def test_loss_and_gradient_agree_with_the_papers_formula(name, data):
    batch = data.draw(batches_of(name))
    assert_agree(lambda x: batch.loss(name, x), lambda x: REFERENCES[name](batch, x, batch.log_prob), batch.log_prob)


def run_clip_cov(batch: Batch, seed: int) -> tuple[float, Tensor, set]:
    """Loss, gradient, and the tokens that lost their gradient although PPO does not clip them."""
    torch.manual_seed(seed)
    got, gradient = value_and_gradient(lambda x: batch.loss_and_metrics("clip_cov", x)[0], batch.log_prob)
    return got, gradient, {p for p in batch.places if gradient[p] == 0 and not ppo_clips(batch, *p)}


def ppo_clips(batch: Batch, i: int, t: int) -> bool:
    r, advantage = ratio(batch, batch.log_prob, i, t), batch.advantages[i, t]
    return bool(ppo_objective(r, advantage, batch.config) < r * advantage)


def band(batch: Batch) -> list:
    """Tokens that Clip-Cov may draw: covariance strictly between the bounds, not clipped by PPO already."""
    settings_, covariance = batch.config.policy_loss, covariances(batch, batch.log_prob)
    inside = [p for p in batch.places if settings_.clip_cov_lb < covariance[p] < settings_.clip_cov_ub]
    return [p for p in inside if not ppo_clips(batch, *p)]


@settings(max_examples=25)
@given(batch=batches(), seed=seeds)
def test_clip_cov_leaves_out_as_many_tokens_of_the_band_as_the_formula_says(batch, seed):
    """Clip-Cov of 2505.22617: k N tokens of the band, drawn at random, leave the loss; the rest is PPO's loss."""
    assume(batch.places and all(batch.advantages[p] != 0 for p in batch.places))
    got, gradient, chosen = run_clip_cov(batch, seed)
    many = max(1, int(batch.config.policy_loss.clip_cov_ratio * len(batch.places)))
    assert chosen <= set(band(batch)) and len(chosen) == min(many, len(band(batch)))

    def reference(log_prob):
        return batch.aggregated(batch.each(lambda i, t: log_prob.new_zeros(()) if (i, t) in chosen else -ppo_objective(
            ratio(batch, log_prob, i, t), batch.advantages[i, t], batch.config)))  # fmt: skip

    want, expected = value_and_gradient(reference, batch.log_prob)
    assert got == pytest.approx(want, rel=1e-10, abs=1e-10)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-10)


def test_clip_cov_draws_every_token_of_the_band_alike():
    """One of 4 tokens a draw: 200 draws hit each 50 times, give or take 4 standard deviations (6.1 each)."""
    log_prob = torch.tensor([[-1.0, -1.0, -1.0, -1.0, -3.0, -3.0, -3.0, -3.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 0.5, 0.5]], dtype=torch.float64)
    # mean A 1.125, mean log pi -2: covariances of the pairs -0.125, 0.875, 0.125, 0.625
    config = ActorConfig(
        strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, clip_ratio_low=0.2, clip_ratio_high=0.2,
        policy_loss=PolicyLossConfig(clip_cov_ratio=0.0002, clip_cov_lb=0.5, clip_cov_ub=5.0),
    )  # fmt: skip
    batch = Batch(log_prob, log_prob, advantages, torch.ones(1, 8), None, "token-mean", StepCounts(), config)
    hits = dict.fromkeys(band(batch), 0)
    for seed in range(200):
        (place,) = run_clip_cov(batch, seed)[2]
        hits[place] += 1
    assert sorted(hits) == [(0, 2), (0, 3), (0, 6), (0, 7)]
    assert all(abs(count - 50) < 25 for count in hits.values())


@settings(max_examples=20)
@given(batch=batches())
def test_vanilla_metrics_count_what_the_formula_clips(batch):
    assume(batch.places)
    _, metrics = batch.loss_and_metrics("vanilla", batch.log_prob)
    n = len(batch.places)
    lower = [p for p in batch.places if batch.advantages[p] < 0
             and batch.config.clip_ratio_c < ratio(batch, batch.log_prob, *p)]  # fmt: skip
    kl = sum(float(batch.old[p] - batch.log_prob[p]) for p in batch.places) / n
    assert metrics["actor/pg_clipfrac"] == pytest.approx(sum(ppo_clips(batch, *p) for p in batch.places) / n)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(len(lower) / n)
    assert metrics["actor/ppo_kl"] == pytest.approx(kl, rel=1e-5, abs=1e-6)  # a float32 mean


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(max_examples=20)
@given(mask=masks(), seed=seeds, scale=st.sampled_from([None, 7]))
def test_aggregation_agrees_with_the_papers_formula(mode, mask, seed, scale):
    losses = junk_outside(normal(seed, *mask.shape), mask)

    def reference(x):
        return aggregated([[x[i, t] for t in ts] for i, ts in enumerate(counted(mask))], mode, scale or mask.shape[1])

    assert_agree(lambda x: agg_loss(x, mask, mode, loss_scale_factor=scale), reference, losses)


@settings(max_examples=20)
@given(mask=masks(), seed=seeds, reach=st.floats(0.1, 1.0), mode=st.sampled_from(LOSS_AGG_MODES))
def test_value_loss_and_gradient_agree_with_the_formula(mask, seed, reach, mode):
    """The clipped value loss of PPO's authors: max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2."""
    old, returns = normal(seed, *mask.shape), normal(seed + 1, *mask.shape)
    step = away_from(normal(seed + 2, *mask.shape), [-reach, reach])
    # where both squares are equal, V and its clipped form lie alike on both sides of R: a kink, too
    returns = torch.where((2 * returns - 2 * old - step - step.clamp(-reach, reach)).abs() < 1e-3, returns + 1, returns)
    values = junk_outside(old + step, mask)

    def loss(x):
        return compute_value_loss(x, returns, old, mask, reach, mode)[0]

    def rule(value, v_old, target):
        return max((value - target) ** 2, (clip(value, v_old - reach, v_old + reach) - target) ** 2) / 2

    def reference(x):
        rows = [[rule(x[i, t], old[i, t], returns[i, t]) for t in ts] for i, ts in enumerate(counted(mask))]
        return aggregated(rows, mode, mask.shape[1])

    assert_agree(loss, reference, values)
    assert torch.autograd.gradcheck(loss, values.clone().requires_grad_(), eps=1e-6, atol=1e-5, rtol=1e-5)


@settings(max_examples=15)
@given(mask=masks(max_rows=3, max_width=3), seed=seeds, mode=st.sampled_from(LOSS_AGG_MODES))
def test_entropy_and_gradient_agree_with_the_formula(mask, seed, mode):
    """Entropy -sum p log p of each token's softmax."""
    logits = normal(seed, *mask.shape, 4)

    def reference(x):
        rows = []
        for i, ts in enumerate(counted(mask)):
            weights = [[torch.exp(y) for y in x[i, t]] for t in ts]
            rows.append([-sum(w / sum(ws) * torch.log(w / sum(ws)) for w in ws) for ws in weights])
        return aggregated(rows, mode, mask.shape[1])

    assert_agree(lambda x: compute_entropy_loss(x, mask, mode), reference, logits)


def test_geo_mean_of_unlike_advantages_by_hand():
    """Beyond the paper (its answers have one advantage): each token is clipped by its own sign, A is averaged."""
    old = torch.full((1, 2), -1.0, dtype=torch.float64)
    config = ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, clip_ratio=0.2)
    advantages, log_ratio = torch.tensor([[3.0, -1.0]]), torch.tensor([[2.0, 0.5]]).double().log()
    batch = Batch(old, old + log_ratio, advantages.double(), torch.ones(1, 2), None, "token-mean", StepCounts(), config)
    # log r: ln 2 -> 0.2 (A > 0), -ln 2 -> -0.2 (A < 0); mean 0; mean A 1
    assert batch.loss("geo_mean", batch.log_prob).item() == pytest.approx(-1.0)
