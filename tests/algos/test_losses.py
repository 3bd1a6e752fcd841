"""Policy losses and KL: registries, verl's signatures, controllers; values in test_loss_references.py."""

from types import SimpleNamespace

import pytest
import torch

from verl.algos.aggregation import StepCounts
from verl.algos.names import POLICY_LOSSES
from verl.algos.policy_loss import LOSS_FUNCTIONS, LossInputs, get_loss_fn
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
from verl.workers.config import FSDPActorConfig


def config(**changes):
    settings = dict(
        clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None, clip_ratio_c=3.0, tau_pos=1.0, tau_neg=1.05,
        global_batch_info={},
        policy_loss=SimpleNamespace(
            clip_cov_ratio=0.25, clip_cov_lb=0.05, clip_cov_ub=5.0, kl_cov_ratio=0.25, ppo_kl_coef=1.0,
            dro_beta=0.1,
        ),
    )  # fmt: skip
    return SimpleNamespace(**(settings | changes))


def loss_of(name, ratios, advantages, **changes):
    """(loss, metrics) of one row whose tokens have these ratios pi / pi_old."""
    ratios, advantages = torch.tensor([ratios]), torch.tensor([advantages])
    old = torch.full_like(ratios, -1.0)
    mask = torch.ones_like(ratios)
    return get_policy_loss_fn(name)(old, old + ratios.log(), advantages, mask, "token-mean", config(**changes), None)


@pytest.mark.parametrize(
    ("name", "ratios", "advantages", "share"),
    [
        ("cispo", [2.0], [1.0], 1.0),
        ("gspo", [4.0, 0.25], [1.0, 1.0], 0.0),  # the ratio of the sequence is 1
        ("geo_mean", [2.0, 0.904837], [1.0, 1.0], 0.5),
        ("clip_cov", [1.0, 1.0, 1.0, 1.1], [1.0, 1.0, 0.0, 2.0], 0.25),  # the last has a covariance in the band
    ],
)
def test_share_of_clipped_tokens(name, ratios, advantages, share):
    assert loss_of(name, ratios, advantages)[1]["actor/pg_clipfrac"] == pytest.approx(share)


def test_only_clip_ratio_set_reaches_both_bounds():
    assert loss_of("vanilla", [2.0], [1.0], clip_ratio=0.4)[0].item() == pytest.approx(-1.4)
    assert loss_of("vanilla", [0.5], [-1.0], clip_ratio=0.4)[0].item() == pytest.approx(0.6)


def test_every_named_loss_is_registered_and_the_other_way_round():
    ours = [name for name, loss in LOSS_FUNCTIONS.items() if loss.__module__.startswith("verl.")]
    assert sorted(ours) == sorted(POLICY_LOSSES)
    for find in (get_loss_fn, get_policy_loss_fn):
        with pytest.raises(ValueError, match=f"Known: {', '.join(sorted(LOSS_FUNCTIONS))}[.]"):
            find("none such")


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name != "bypass_mode"])
def test_verls_signature_gives_the_same_loss(name):
    log_prob = torch.tensor([[-0.5, -3.0, -1.0]], requires_grad=True)
    old, advantages = torch.full((1, 3), -1.0), torch.tensor([[1.0, -1.0, 2.0]])
    mask, weights = torch.tensor([[1, 1, 0]]), torch.tensor([[0.5, 2.0, 1.0]])
    counts = StepCounts(dp_size=2, batch_num_tokens=5, global_batch_size=3)
    inputs = LossInputs(log_prob, old, advantages, mask, counts, rollout_is_weights=weights)
    torch.manual_seed(0)
    want = get_loss_fn(name)(inputs, config(loss_agg_mode="seq-mean-token-sum"))
    verl = config(global_batch_info={"dp_size": 2, "batch_num_tokens": 5, "global_batch_size": 3})
    torch.manual_seed(0)
    got = get_policy_loss_fn(name)(old, log_prob, advantages, mask, "seq-mean-token-sum", verl, weights)
    assert got == want and vars(verl).get("loss_agg_mode") is None
    assert get_policy_loss_fn(name) is getattr(core_algos, f"compute_policy_loss_{name}")


def test_a_loss_with_verls_signature_gets_the_counts_in_its_config():
    actor = FSDPActorConfig(ppo_micro_batch_size_per_gpu=1, loss_agg_mode="seq-mean-token-sum")
    row = torch.ones(1, 2)

    def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights):
        assert isinstance(config, FSDPActorConfig) and config.clip_ratio_c == 3.0 and rollout_is_weights is None
        return agg_loss(log_prob, response_mask, loss_agg_mode, **config.global_batch_info), {}

    try:
        core_algos.register_policy_loss("sum")(loss)
        assert core_algos.get_policy_loss_fn("sum") is loss is core_algos.POLICY_LOSS_REGISTRY["sum"]
        inputs = LossInputs(3 * row, row, row, row, StepCounts(dp_size=1, batch_num_tokens=8, global_batch_size=4))
        assert get_loss_fn("sum")(inputs, actor) == (6 / 4, {})
    finally:
        del core_algos.POLICY_LOSS_REGISTRY["sum"]
    assert "sum" not in LOSS_FUNCTIONS and actor.global_batch_info == {}


def test_plain_compute_policy_loss_agrees_with_vanilla(monkeypatch):
    old, new = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-0.5, -3.0]])
    advantages, mask = torch.tensor([[1.0, -1.0]]), torch.ones(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(core_algos, "POLICY_LOSS_REGISTRY", {})  # it does not depend on what is registered
        loss, clipfrac, kl, lower = core_algos.compute_policy_loss(old, new, advantages, mask, cliprange=0.2)
    want, metrics = get_policy_loss_fn("vanilla")(old, new, advantages, mask, "token-mean", config(), None)
    assert loss == want
    assert [clipfrac.item(), kl.item(), lower.item()] == pytest.approx(
        [metrics["actor/pg_clipfrac"], metrics["actor/ppo_kl"], metrics["actor/pg_clipfrac_lower"]]
    )


def test_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="loss_agg_mode='mean'"):
        agg_loss(torch.ones(1, 2), torch.ones(1, 2), "mean")


def test_full_kl_and_unknown_kl_are_refused():
    zero = torch.zeros(1)
    with pytest.raises(ValueError, match="full vocabulary"):
        kl_penalty(zero, zero, "full")
    with pytest.raises(ValueError, match=r"did you mean 'low_var_kl'\?"):
        kl_penalty(zero, zero, "low_var_k")


def test_controllers_are_made_by_type_and_keep_their_state():
    control = core_algos.get_kl_controller(SimpleNamespace(type="adaptive", kl_coef=0.1, target_kl=0.2, horizon=100))
    control.update(current_kl=0.22, n_steps=10)  # error 0.1
    other = core_algos.AdaptiveKLController(1.0, 0.2, 100)
    other.load_state_dict(control.state_dict())
    assert other.value == control.value == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    control = core_algos.get_kl_controller(SimpleNamespace(type="fixed", kl_coef=0.3, target_kl=0.1, horizon=1))
    control.update(5.0, 10)
    assert control.value == 0.3
    with pytest.raises(ValueError, match="kl_ctrl.type='fix'"):
        core_algos.get_kl_controller(SimpleNamespace(type="fix"))


def test_pf_ppo_draws_by_score():
    from verl.protocol import DataProto

    scores = torch.tensor([[0.0, 0.0], [0.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
    data = DataProto.from_dict(tensors={"token_level_scores": scores, "row": torch.arange(4)})
    torch.manual_seed(0)
    drawn = core_algos.compute_pf_ppo_reweight_data(data, "pow", 2.0)
    assert drawn.batch["row"].tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="reweight_method='best'"):
        core_algos.compute_pf_ppo_reweight_data(data, "best")


def test_reinforce_by_hand():
    log_prob = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    advantages, mask = torch.tensor([[1.0, 1.0], [2.0, 2.0]]), torch.tensor([[1, 1], [1, 0]])
    weights = torch.tensor([[1.0, 0.5], [2.0, 2.0]])
    arguments = (torch.zeros_like(log_prob), log_prob, advantages, mask)
    # rows 1 * 1 + 2 * 1 = 3 and 3 * 2 = 6, their mean; weighted 1 + 1 = 2 and 12
    assert core_algos.compute_policy_loss_reinforce(*arguments, config=config())[0].item() == 4.5
    loss, _ = core_algos.compute_policy_loss_reinforce(*arguments, "seq-mean-token-sum", config(), weights)
    loss.backward()
    assert loss.item() == 7.0 and log_prob.grad.tolist() == [[-0.5, -0.25], [-2.0, 0.0]]
