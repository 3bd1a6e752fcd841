"""Rollout correction against its formulas, written out sequence by sequence and token by token.

w = pi_old / pi_rollout of a token, the product over a sequence, or its geometric mean. Truncated importance sampling
takes min(w, C) (Ionides 2008; for rollouts of language models Yao et al. 2025); rejection keeps what lies in
[lower, upper]; the veto drops a sequence with one token below a bound. All of it is held still by the gradient.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.algos.test_loss_references import vanilla
from tests.helpers.algo_batches import counted, junk_outside, masks, normal, seeds
from tests.helpers.policy_batches import Batch, assert_agree, batches
from verl.algos import rollout_correction
from verl.trainer.config import RolloutCorrectionConfig

levels = st.sampled_from([None, "token", "sequence"])
corrections = st.builds(
    RolloutCorrectionConfig, rollout_is=levels, rollout_is_threshold=st.floats(0.5, 3.0),
    rollout_rs=st.sampled_from([None, "token", "sequence", "geometric"]), rollout_rs_threshold=st.floats(1.05, 4.0),
    rollout_rs_threshold_lower=st.one_of(st.none(), st.floats(0.2, 0.9)),
    rollout_token_veto_threshold=st.one_of(st.none(), st.floats(0.1, 0.6)), rollout_is_batch_normalize=st.booleans(),
)  # fmt: skip


def ratios(level: str, log_ratio: Tensor, positions: list[list[int]]) -> dict:
    """{(i, t): w} of each counted token: its own, its sequence's, or the geometric mean of its sequence's."""
    out = {}
    for i, ts in enumerate(positions):
        product = math.prod(math.exp(float(log_ratio[i, t])) for t in ts)
        for t in ts:
            out[i, t] = {"token": math.exp(float(log_ratio[i, t])), "sequence": product,
                         "geometric": product ** (1 / len(ts))}[level]  # fmt: skip
    return out


def reference_weights(log_ratio: Tensor, mask: Tensor, config) -> dict | None:
    """min(w, C), over the mean weight of tokens (or of sequences) where it is normalised."""
    if config.rollout_is is None:
        return None
    positions = counted(mask)
    cut = {p: min(w, config.rollout_is_threshold) for p, w in ratios(config.rollout_is, log_ratio, positions).items()}
    if not config.rollout_is_batch_normalize or not cut:
        return cut
    each = [cut[i, t] for i, ts in enumerate(positions) for t in (ts if config.rollout_is == "token" else ts[:1])]
    return {p: w / (sum(each) / len(each)) for p, w in cut.items()}


def reference_kept(log_ratio: Tensor, mask: Tensor, config) -> set:
    """Places that neither rejection nor the veto takes out."""
    positions = counted(mask)
    own = ratios("token", log_ratio, positions)
    kept = set(own)
    if config.rollout_rs is not None:
        lower = config.rollout_rs_threshold_lower or 1 / config.rollout_rs_threshold
        computed = ratios(config.rollout_rs, log_ratio, positions)
        kept = {p for p in kept if lower <= computed[p] <= config.rollout_rs_threshold}
    if config.rollout_token_veto_threshold is not None:
        vetoed = {i for (i, t), w in own.items() if w < config.rollout_token_veto_threshold}
        kept = {(i, t) for i, t in kept if i not in vetoed}
    return kept


@settings(max_examples=120)
@given(mask=masks(), seed=seeds, scale=st.sampled_from([0.2, 0.8]), config=corrections)
def test_weights_and_mask_agree_with_the_formulas(mask, seed, scale, config):
    log_ratio = normal(seed, *mask.shape, scale=scale)
    rollout = junk_outside(normal(seed + 1, *mask.shape), mask)
    weights, kept, _ = rollout_correction.compute_rollout_correction_and_rejection_mask(
        rollout + junk_outside(log_ratio, mask), rollout, mask, **rollout_correction.settings_of(config)
    )
    expected = reference_weights(log_ratio, mask, config)
    assert (weights is None) == (expected is None)
    for i in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            assert bool(kept[i, t]) == ((i, t) in reference_kept(log_ratio, mask, config))
            if expected is not None:
                got = weights.batch["rollout_is_weights"][i, t].item()
                assert got == pytest.approx(expected.get((i, t), 0.0), rel=1e-10, abs=1e-12)


def bypass(batch: Batch, log_prob: Tensor, frozen: Tensor) -> Tensor:
    """reinforce: -sg(w) A log pi; ppo_clip: PPO with old = rollout. What is rejected counts as a token of loss 0."""
    config = batch.config.policy_loss.rollout_correction
    log_ratio = torch.where(batch.mask.bool(), frozen - batch.old, 0.0)
    kept = reference_kept(log_ratio, batch.mask, config)
    if config.loss_type == "ppo_clip":
        weights = [[float((i, t) in kept) for t in range(batch.mask.shape[1])] for i in range(batch.mask.shape[0])]
        return vanilla(replace(batch, weights=torch.tensor(weights)), log_prob, frozen)
    weights = reference_weights(log_ratio, batch.mask, config) or dict.fromkeys(batch.places, 1.0)
    return batch.aggregated({
        p: -weights[p] * batch.advantages[p] * log_prob[p] * float(p in kept) for p in batch.places
    })  # fmt: skip


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@settings(max_examples=40)
@given(data=st.data())
def test_bypass_mode_agrees_with_the_formula(loss_type, data):
    """`old` are the rollout's log-probs, and no weights come with the batch."""
    batch, correction = data.draw(batches()), replace(data.draw(corrections), bypass_mode=True, loss_type=loss_type)
    policy_loss = replace(batch.config.policy_loss, rollout_correction=correction)
    batch = replace(batch, weights=None, config=replace(batch.config, policy_loss=policy_loss))
    assert_agree(lambda x: batch.loss("bypass_mode", x), lambda x: bypass(batch, x, batch.log_prob), batch.log_prob)


@settings(max_examples=40)
@given(mask=masks(), seed=seeds)
def test_distances_agree_with_their_formulas(mask, seed):
    """k1 and k3 of KL(rollout || old) (Schulman 2020), chi^2 = E[w^2] - 1, a sequence's exp(-mean log pi)."""
    old, rollout = -normal(seed, *mask.shape).abs(), -normal(seed + 1, *mask.shape).abs()
    computed = rollout_correction.compute_offpolicy_metrics(junk_outside(old, mask), junk_outside(rollout, mask), mask)
    rows = [(i, ts) for i, ts in enumerate(counted(mask)) if ts]
    if not rows:
        assert computed == {}
        return
    gaps = [[float(old[i, t] - rollout[i, t]) for t in ts] for i, ts in rows]
    ours = [-sum(float(old[i, t]) for t in ts) / len(ts) for i, ts in rows]
    theirs = [-sum(float(rollout[i, t]) for t in ts) / len(ts) for i, ts in rows]
    tokens = [gap for row in gaps for gap in row]

    def mean(numbers):
        return sum(numbers) / len(numbers)

    expected = {
        "kl": -mean(tokens), "k3_kl": mean([math.exp(g) - 1 - g for g in tokens]),
        "chi2_token": mean([math.exp(2 * g) for g in tokens]) - 1,
        "chi2_seq": mean([math.exp(2 * sum(row)) for row in gaps]) - 1,
        "training_log_ppl": mean(ours), "training_ppl": mean([math.exp(x) for x in ours]),
        "rollout_log_ppl": mean(theirs), "rollout_ppl": mean([math.exp(x) for x in theirs]),
        "log_ppl_diff": mean(ours) - mean(theirs), "ppl_ratio": mean([math.exp(-mean(row)) for row in gaps]),
        "log_ppl_abs_diff": mean([abs(mean(row)) for row in gaps]),
        "log_ppl_diff_max": max(-mean(row) for row in gaps), "log_ppl_diff_min": min(-mean(row) for row in gaps),
    }  # fmt: skip
    assert computed == pytest.approx(expected, rel=1e-9, abs=1e-9)
