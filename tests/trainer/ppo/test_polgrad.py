"""Losses, their gradients, KL terms and advantages against the package polgrad, over random ragged batches."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.algo_batches import junk_outside, normal
from verl.algos.advantage import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from verl.algos.aggregation import StepCounts, agg_loss
from verl.algos.kl import kl_penalty
from verl.algos.policy_loss import LossInputs, get_loss_fn
from verl.workers.config import ActorConfig

polgrad = pytest.importorskip("polgrad")

ROWS, WIDTH, BUDGET = 12, 9, 16
SEEDS = range(4)
MODES = {"token-mean": "TOKEN_MEAN", "seq-mean-token-mean": "SEQ_MEAN_TOKEN_MEAN",
         "seq-mean-token-sum": "SEQ_MEAN_TOKEN_SUM", "seq-mean-token-sum-norm": "TOKEN_SUM_NORM"}  # fmt: skip
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def batch(seed):
    """A ragged batch in double, with large numbers at padding: (log_prob, old, ref, advantages, mask)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    mask = torch.arange(WIDTH)[None] < lengths[:, None]
    old = normal(seed + 1, ROWS, WIDTH) - 3
    log_prob = old + normal(seed + 2, ROWS, WIDTH, scale=0.6)  # most ratios are outside of the clip range
    ref, advantages = old + normal(seed + 3, ROWS, WIDTH, scale=0.5), normal(seed + 4, ROWS, WIDTH)
    return SimpleNamespace(log_prob=log_prob, old=old, ref=ref, advantages=advantages, mask=mask)


def gradient(function, point):
    point = point.clone().requires_grad_(True)
    value = function(point)
    value.backward()
    return value.detach(), point.grad


LOSSES = {  # our settings; ratio, surrogate and clip range there
    "ppo": ("vanilla", {"clip_ratio": 0.2, "clip_ratio_c": 1e9}, "TOKEN", "PG_CLIP", (0.2, 0.2, None)),
    "dual clip": ("vanilla", {"clip_ratio": 0.2, "clip_ratio_c": 1.5}, "TOKEN", "PG_CLIP", (0.2, 0.2, 1.5)),
    "dapo": ("vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e9}, "TOKEN", "PG_CLIP",
             (0.2, 0.28, None)),
    "cispo": ("cispo", {"clip_ratio_low": 0.5, "clip_ratio_high": 0.3}, "TOKEN", "CISPO", (0.5, 0.3, None)),
    "gpg": ("gpg", {}, "TOKEN", "REINFORCE", None),
    "gspo": ("gspo", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}, "SEQUENCE_TOKEN", "PG_CLIP",
             (0.05, 0.08, None)),
}  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "mode"), [
    *((name, mode) for name in LOSSES if name != "gspo" for mode in MODES), ("gspo", "seq-mean-token-mean")
])  # fmt: skip
def test_losses_and_gradients(name, mode, seed):
    loss_mode, settings, ratio, surrogate, clip = LOSSES[name]
    given = batch(seed)
    config = ActorConfig(strategy="fsdp", rollout_n=1, loss_agg_mode=mode, loss_scale_factor=BUDGET, **settings)

    def ours(log_prob):
        inputs = LossInputs(junk_outside(log_prob, given.mask), junk_outside(given.old, given.mask),
                            junk_outside(given.advantages, given.mask), given.mask.long(),
                            StepCounts(loss_scale_factor=BUDGET))  # fmt: skip
        return get_loss_fn(loss_mode)(inputs, config)[0]

    reference = polgrad.PolicyLossConfig(
        ratio=polgrad.RatioKind[ratio], surrogate=polgrad.SurrogateKind[surrogate],
        clip=None if clip is None else polgrad.ClipConfig(*clip), aggregation=polgrad.Aggregation[MODES[mode]],
        norm_len=BUDGET if mode == "seq-mean-token-sum-norm" else None,
    )  # fmt: skip

    def theirs(log_prob):
        return polgrad.policy_loss(reference, logprobs=log_prob, old_logprobs=given.old, advantages=given.advantages,
                                   response_mask=given.mask).loss  # fmt: skip

    for own, other in zip(gradient(ours, given.log_prob), gradient(theirs, given.log_prob), strict=True):
        torch.testing.assert_close(own, other, **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_kl_terms_and_gradients(kind, mode, seed):
    given = batch(seed)
    norm = {"norm_len": BUDGET} if mode == "seq-mean-token-sum-norm" else {}

    def ours(log_prob):
        return agg_loss(kl_penalty(log_prob, given.ref, kind), given.mask.long(), mode, loss_scale_factor=BUDGET)

    def theirs(log_prob):
        kinds, aggregation = polgrad.KLEstimator[kind.upper()], polgrad.Aggregation[MODES[mode]]
        return polgrad.kl_loss(log_prob, given.ref, kinds, aggregation, response_mask=given.mask, **norm)

    for own, other in zip(gradient(ours, given.log_prob), gradient(theirs, given.log_prob), strict=True):
        torch.testing.assert_close(own, other, **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_gradient_of_the_reverse_kl(seed):
    given = batch(seed)
    value, own = gradient(
        lambda log_prob: agg_loss(kl_penalty(log_prob, given.ref, "k3+"), given.mask.long(), "token-mean"),
        given.log_prob,
    )
    _, other = gradient(
        lambda log_prob: polgrad.kl_loss(log_prob, given.ref, polgrad.KLEstimator.K2, polgrad.Aggregation.TOKEN_MEAN,
                                         response_mask=given.mask), given.log_prob,
    )  # fmt: skip
    torch.testing.assert_close(own, other, **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
def test_group_advantages(seed):
    given = batch(seed)
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 3, 3])
    scores = torch.randint(0, 3, (ROWS,), generator=torch.Generator().manual_seed(seed)).double()
    rewards = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    rewards[:, 0] = scores
    index, mask = np.array([f"prompt {group}" for group in groups.tolist()], dtype=object), given.mask.long()
    for by_std in (True, False):
        own, _ = compute_grpo_outcome_advantage(rewards, mask, index, epsilon=1e-6, norm_adv_by_std_in_grpo=by_std)
        config = polgrad.GroupNormConfig(scale="std" if by_std else "none", eps=1e-6)
        other = polgrad.grpo_advantages(scores, groups, config)
        torch.testing.assert_close(own, polgrad.broadcast_to_tokens(other, given.mask), **CLOSE)
    own, _ = compute_rloo_outcome_advantage(rewards, mask, index)
    other = polgrad.broadcast_to_tokens(polgrad.rloo_advantages(scores, groups), given.mask)
    torch.testing.assert_close(own, other, **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (0.9, 0.0)])
def test_generalised_advantages(seed, gamma, lam):
    given = batch(seed)
    rewards, values = given.advantages * given.mask, given.ref
    own, returns = compute_gae_advantage_return(rewards, values, given.mask.long(), gamma, lam)
    config = polgrad.GAEConfig(gamma=gamma, lam=lam)
    advantages, other = polgrad.gae(rewards, values, config=config, response_mask=given.mask)
    torch.testing.assert_close(returns[given.mask], other[given.mask], **CLOSE)
    expected = advantages[given.mask]
    expected = (expected - expected.mean()) / (expected.var() + 1e-8).sqrt()
    torch.testing.assert_close(own[given.mask], expected, rtol=1e-6, atol=1e-7)
