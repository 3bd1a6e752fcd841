"""Metrics of rollout correction, and the columns of a batch; weights and masks: test_rollout_corr_references.py."""

from types import SimpleNamespace

import pytest
import torch

from verl.algos import rollout_correction
from verl.protocol import DataProto
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import get_policy_loss_fn

# Ratios pi_old / pi_rollout of two sequences; the last token of the second one is padding.
RATIO = torch.tensor([[1.0, 4.0, 0.5], [0.5, 0.25, 9.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
LOG_RATIO = RATIO.log()


def test_token_weights_are_cut_at_the_threshold():
    weights, metrics = rollout_correction.compute_rollout_correction_weights(LOG_RATIO, MASK, "token", 2.0)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 2.0, 0.5], [0.5, 0.25, 0.0]]))
    assert metrics["rollout_is_mean"] == pytest.approx((1 + 4 + 0.5 + 0.5 + 0.25) / 5)
    assert metrics["rollout_is_max"] == 4.0 and metrics["rollout_is_min"] == 0.25
    assert metrics["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 5)
    assert metrics["rollout_is_ratio_fraction_low"] == pytest.approx(1 / 5)  # below 1 / 2: 0.25 alone
    cut = torch.tensor([1, 2, 0.5, 0.5, 0.25])
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx((cut.sum() ** 2 / (5 * (cut**2).sum())).item())


def test_normalised_weights_name_what_they_were_divided_by():
    for level, factor in (("token", 4.25 / 5), ("sequence", (2.0 + 0.125) / 2)):
        _, metrics = rollout_correction.compute_rollout_correction_weights(LOG_RATIO, MASK, level, 2.0, True)
        assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(factor)


def test_a_missing_upper_bound_is_named():
    with pytest.raises(ValueError, match="rollout_rs_threshold is not set"):
        rollout_correction.compute_rollout_rejection_mask(LOG_RATIO, MASK, "token")


def test_vetoes_are_counted_and_leave_the_weights():
    weights, _, metrics = rollout_correction.compute_rollout_correction_and_rejection_mask(
        LOG_RATIO, torch.zeros(2, 3), MASK, rollout_is="token", rollout_token_veto_threshold=0.3
    )
    assert weights.batch["rollout_is_weights"][1, 0] == 0.5  # weights stay those of all counted tokens
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == 0.5
    assert metrics["rollout_corr/rollout_is_catastrophic_token_fraction"] == pytest.approx(1 / 5)


def test_the_batch_gets_weights_and_a_smaller_mask():
    columns = {"old_log_probs": LOG_RATIO, "rollout_log_probs": torch.zeros(2, 3), "response_mask": MASK}
    batch = DataProto.from_dict(columns)
    config = RolloutCorrectionConfig.decoupled_seq_is_rs(is_threshold=1.5, rs_threshold=3.0)
    batch, metrics = rollout_correction.compute_rollout_correction_and_add_to_batch(batch, config)
    assert batch.batch["response_mask"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert batch.batch["rollout_is_weights"][0].tolist() == [1.5, 1.5, 1.5]
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.5


def test_bypass_takes_the_rollouts_log_probs_as_old_ones():
    batch = DataProto.from_dict({"rollout_log_probs": LOG_RATIO})
    rollout_correction.apply_bypass_mode(batch)
    assert torch.equal(batch.batch["old_log_probs"], LOG_RATIO)
    with pytest.raises(ValueError, match="calculate_log_probs=true, or set these two to false"):
        rollout_correction.apply_bypass_mode(DataProto.from_dict({"old_log_probs": LOG_RATIO}))


def test_bypass_mode_with_verls_signature():
    log_prob = torch.tensor([[-1.0, -0.5, -2.0], [-1.0, -3.0, 0.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0, 1.0], [-2.0, -2.0, 0.0]])
    correction = RolloutCorrectionConfig.bypass_pg_is(threshold=1.5)
    config = SimpleNamespace(policy_loss=SimpleNamespace(rollout_correction=correction), global_batch_info={})
    loss, metrics = get_policy_loss_fn("bypass_mode")(
        old_log_prob=log_prob.detach() - LOG_RATIO, log_prob=log_prob, advantages=advantages, response_mask=MASK,
        loss_agg_mode="token-mean", config=config, rollout_is_weights=None,
    )  # fmt: skip
    loss.backward()
    torch.testing.assert_close(log_prob.grad, -advantages * torch.tensor([[1.5] * 3, [0.125, 0.125, 0.0]]) / 5)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(2.0)
