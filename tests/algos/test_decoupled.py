"""Objectives of asynchronous training: all sequences of a toy policy, whose samples are of two weights versions."""

import itertools

import pytest
import torch

from verl.algos.policy_loss import LossInputs, get_loss_fn
from verl.algos.rollout_correction import apply_bypass_mode, compute_rollout_correction_and_add_to_batch
from verl.config.actor import ActorConfig
from verl.config.algorithm import RolloutCorrectionConfig
from verl.config.asynchronous import AsyncTrainingConfig, objective_settings
from verl.protocol import DataProto

WORDS, LENGTH, END, BASELINE = 3, 3, 0, 0.3
USE_ROLLOUT = "actor_rollout_ref.actor.use_rollout_log_probs"
CORRECTION = "algorithm.rollout_correction"
UNBOUNDED = 1e9


def objective(use_rollout_log_probs, compute_prox_log_prob, correction, **settings):
    """`objective_settings` of async_training with these keys."""
    names = {"use_rollout_log_probs": use_rollout_log_probs, "compute_prox_log_prob": compute_prox_log_prob}
    return objective_settings(AsyncTrainingConfig(**names, **settings), correction)


def sequences():
    """Every response [S, R], padded with END, with its mask: END ends a response, as does its LENGTH."""
    rows = {}
    for tokens in itertools.product(range(WORDS), repeat=LENGTH):
        length = tokens.index(END) + 1 if END in tokens else LENGTH
        rows[tokens[:length]] = [int(place < length) for place in range(LENGTH)]
    padded = [[*tokens, *[END] * (LENGTH - len(tokens))] for tokens in rows]
    return torch.tensor(padded), torch.tensor(list(rows.values()))


TOKENS, MASK = sequences()
REWARDS = torch.rand(len(TOKENS), generator=torch.manual_seed(3), dtype=torch.float64)


def weights(seed, near=None, distance=1.0):
    """Logits [R, last token, token] of one version; `near` another one, a random step of this size away."""
    step = torch.randn(LENGTH, WORDS, WORDS, generator=torch.manual_seed(seed), dtype=torch.float64)
    return step if near is None else near + distance * step


def log_probs(theta):
    """Of each token [S, R]."""
    before = torch.cat([torch.zeros_like(TOKENS[:, :1]), TOKENS[:, :-1]], dim=1)
    logits = theta[torch.arange(LENGTH), before]  # [S, R, token]
    return logits.log_softmax(-1).gather(-1, TOKENS.unsqueeze(-1)).squeeze(-1)


def exact_gradient(theta):
    theta = theta.clone().requires_grad_()
    (((log_probs(theta) * MASK).sum(-1).exp()) * REWARDS).sum().backward()
    return theta.grad


def interrupted_after(first):
    """Tokens [S, R] of the second version; `first` tokens, or one more where the first token is 1 (a stopping time)."""
    ends = first + (TOKENS[:, :1] == 1).long()
    return torch.arange(LENGTH) >= ends


def estimator_mean(theta, behaviour, prox, settings):
    """The expected gradient of -loss over the responses that `behaviour` [S, R] samples, at the weights `theta`."""
    chances = (behaviour * MASK).sum(-1).exp()
    assert chances.sum().item() == pytest.approx(1.0)
    theta = theta.clone().requires_grad_()
    batch = DataProto.from_dict({"rollout_log_probs": behaviour, "old_log_probs": prox, "response_mask": MASK})
    correction = settings[CORRECTION]
    if settings[USE_ROLLOUT] or (correction and correction.bypass_mode):
        apply_bypass_mode(batch)
    if correction and not correction.bypass_mode:
        batch, _ = compute_rollout_correction_and_add_to_batch(batch, correction)
    config = ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, clip_ratio=UNBOUNDED,
                         loss_agg_mode="seq-mean-token-sum", clip_ratio_c=UNBOUNDED)  # fmt: skip
    object.__setattr__(config.policy_loss, "rollout_correction", correction)
    loss_fn = get_loss_fn("bypass_mode" if correction and correction.bypass_mode else "vanilla")
    trained, columns, total = log_probs(theta), batch.batch, torch.zeros((), dtype=torch.float64)
    for row in range(len(TOKENS)):  # a batch of its own each, weighted by its chance
        own = slice(row, row + 1)
        inputs = LossInputs(
            log_prob=trained[own], old_log_prob=columns["old_log_probs"][own],
            advantages=(REWARDS[own, None] - BASELINE).expand(1, LENGTH), response_mask=columns["response_mask"][own],
            rollout_is_weights=columns["rollout_is_weights"][own] if "rollout_is_weights" in columns else None,
        )  # fmt: skip
        total = total - chances[row] * loss_fn(inputs, config)[0]
    total.backward()
    return theta.grad


def two_versions(distance, first=1):
    """(weights at the start of a step, log-probs of samples whose first tokens are of an older version)."""
    theta = weights(0)
    newer = weights(1, theta, distance)
    older = weights(2, newer, distance)
    return theta, torch.where(interrupted_after(first), log_probs(newer), log_probs(older))


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("distance", [0.1, 0.5])
def test_decoupled_ppo_with_weights_of_trajectories_is_unbiased(distance, first):
    theta, behaviour = two_versions(distance, first)
    correction = RolloutCorrectionConfig.decoupled_seq_is(threshold=UNBOUNDED)
    settings = objective(True, True, correction)
    mean = estimator_mean(theta, behaviour, log_probs(theta), settings)
    assert (mean - exact_gradient(theta)).abs().max() < 1e-6
    assert exact_gradient(theta).abs().max() > 1e-2


@pytest.mark.parametrize("first", [1, 2])
def test_the_weighted_policy_gradient_is_unbiased_at_any_weights(first):
    _, behaviour = two_versions(0.5, first)
    settings = objective(True, False, RolloutCorrectionConfig.bypass_pg_is(threshold=UNBOUNDED))
    trained = weights(7)  # far from both versions
    mean = estimator_mean(trained, behaviour, log_probs(trained), settings)
    assert (mean - exact_gradient(trained)).abs().max() < 1e-6


@pytest.mark.parametrize("correction", [None, RolloutCorrectionConfig.disabled()])
def test_columns_of_each_objective(correction):
    settings = objective(True, False, correction)
    assert settings[USE_ROLLOUT] and settings[CORRECTION] is correction
    assert settings["actor_rollout_ref.rollout.calculate_log_probs"]
    for use_rollout in (True, False):
        settings = objective(use_rollout, True, correction)
        assert not settings[USE_ROLLOUT] and settings[CORRECTION].rollout_is == "token"
        assert settings[CORRECTION].rollout_is_threshold == 2.0
    settings = objective(False, True, correction, allow_off_policy=True)
    assert settings[CORRECTION] is correction  # no weights are added
    given = RolloutCorrectionConfig.decoupled_seq_is_rs(rs_threshold=3.0)
    assert objective(True, True, given)[CORRECTION] is given
    rejects = RolloutCorrectionConfig(rollout_is=None, rollout_rs="token", rollout_rs_threshold=3.0)
    weighted = objective(True, True, rejects)[CORRECTION]
    assert (weighted.rollout_is, weighted.rollout_rs, weighted.rollout_rs_threshold) == ("token", "token", 3.0)


def test_an_objective_against_other_weights_is_refused_unless_a_key_permits_it():
    for correction in (None, RolloutCorrectionConfig.disabled(), RolloutCorrectionConfig.decoupled_token_is()):
        with pytest.raises(ValueError, match="use_rollout_log_probs=false .* async_training.allow_off_policy=true"):
            objective(False, False, correction)
        for permits in ({"staleness_threshold": 0, "trigger_parameter_sync_step": 1}, {"allow_off_policy": True}):
            settings = objective(False, False, correction, **permits)
            assert not settings[USE_ROLLOUT] and settings[CORRECTION] is correction
    bypass = RolloutCorrectionConfig.bypass_ppo_clip()
    assert objective(False, False, bypass)[CORRECTION] is bypass
    with pytest.raises(ValueError, match="bypass_mode=true leaves out. Set one of them to false"):
        objective(True, True, bypass)
