"""Actor: the loss by hand, bad batches are named, cuts along groups; that cuts change no step is in test_cuts.py."""

import math

import pytest
import torch

from tests.helpers.engines import make_actor, make_engine, rl_batch, weights_of
from verl.algos.policy_loss import LOSS_FUNCTIONS, LOSSES_OF_ADVANTAGES
from verl.config.actor import PolicyLossConfig
from verl.training.actor.base import _AUXILIARY_LOSSES, AuxiliaryLoss
from verl.training.actor.batch_cuts import groups_of, join_units, micro_batches
from verl.workers.config import FSDPOptimizerConfig


def update(tiny_llama, batch=None, **config):
    engine = make_engine(tiny_llama)
    return make_actor(engine, **config).update_policy(batch or rl_batch()), weights_of(engine)


@pytest.mark.parametrize(("own", "of_role", "limit"), [(1e-3, 1.0, 1e-3), (None, 1e-3, 1e-3), (1.0, 1e-3, 1.0)])
def test_the_optimizers_own_limit_of_the_gradient_comes_before_the_roles(tiny_llama, own, of_role, limit):
    engine = make_engine(tiny_llama, optim={"optimizer": "SGD", "lr": 1.0, "weight_decay": 0.0})
    before, optim = weights_of(engine), FSDPOptimizerConfig(lr=1.0, clip_grad=own)
    norm = make_actor(engine, optim=optim, grad_clip=of_role).update_policy(rl_batch())["actor/grad_norm"][0]
    moved = sum(float(((new - before[name]) ** 2).sum()) for name, new in weights_of(engine).items())
    assert norm > 1e-2 and moved**0.5 == pytest.approx(min(norm, limit), rel=1e-3)


def test_the_loss_is_the_formula_over_counted_tokens(llama):
    batch = rl_batch()
    actor = make_actor(make_engine(llama), micro=3)
    log_prob, entropy = actor.compute_log_prob(batch, calculate_entropy=True)
    metrics = actor.update_policy(batch)
    mask, adv = batch.batch["response_mask"].bool(), batch.batch["advantages"]
    ratio = (log_prob - batch.batch["old_log_probs"]).exp()
    by_hand = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.2))
    by_hand = torch.where(adv < 0, torch.minimum(by_hand, -3.0 * adv), by_hand)[mask].mean().item()
    assert metrics["actor/pg_loss"] == [pytest.approx(by_hand, rel=1e-5)]
    drift = (log_prob - batch.batch["old_log_probs"]).abs()[mask]
    assert metrics["actor/logprob_drift"] == [pytest.approx(drift.mean().item(), rel=1e-5)]
    assert metrics["actor/logprob_drift_max"] == [pytest.approx(drift.max().item(), rel=1e-5)]
    assert metrics["actor/nonfinite_steps"] == [0]
    assert "actor/entropy" not in metrics
    assert 0 < entropy[mask].mean() < math.log(64)


def rows_read(actor, monkeypatch):
    """The sizes of the micro-batches that the actor's policy reads from now on."""
    rows, read = [], actor.policy.log_probs

    def log_probs(model, micro, **options):
        rows.append(len(micro))
        return read(model, micro, **options)

    monkeypatch.setattr(actor.policy, "log_probs", log_probs)
    return rows


class Pull(AuxiliaryLoss):
    """Half the squared norm of all weights, whose gradient is the weights."""

    def __init__(self, settings, config, engine):
        self.engine = engine

    def begin(self, mini):
        self.rows = len(mini)

    def backward(self, batch):
        share = len(batch) / self.rows
        loss = share * sum(p.to_local().square().sum() for p in self.engine.module.parameters()) / 2
        self.engine.backward(loss, is_last_micro_batch=False)
        return {"actor/pull": share}


def test_a_registered_loss_adds_its_gradient(tiny_llama, monkeypatch):
    monkeypatch.setitem(_AUXILIARY_LOSSES, "pull", Pull)
    batch, engine = rl_batch(), make_engine(tiny_llama)
    batch.batch["advantages"].zero_()
    norm = math.sqrt(sum(p.to_local().double().square().sum().item() for p in engine.module.parameters()))
    metrics = make_actor(engine, micro=2).update_policy(batch)
    assert metrics["actor/pull"] == [pytest.approx(1.0)] and metrics["actor/grad_norm"] == [pytest.approx(norm, 1e-4)]


def test_mini_batches_and_epochs_each_take_a_step(tiny_llama):
    metrics, _ = update(tiny_llama, mini=4, ppo_epochs=2, shuffle=True)
    assert len(metrics["actor/pg_loss"]) == len(metrics["actor/grad_norm"]) == 4


def test_without_old_log_probs_a_single_step_uses_its_own(tiny_llama):
    batch = rl_batch()
    batch.batch.pop("old_log_probs")
    metrics, _ = update(tiny_llama, batch)
    mask, adv = batch.batch["response_mask"].bool(), batch.batch["advantages"]
    assert metrics["actor/pg_loss"] == [pytest.approx(-adv[mask].mean().item(), rel=1e-5)]
    assert metrics["actor/logprob_drift"] == [0.0]
    with pytest.raises(ValueError, match="ppo_mini_batch_size=4 .* Add those of compute_log_prob"):
        update(tiny_llama, batch, mini=4)


@pytest.mark.parametrize("loss", sorted(name for name, loss in LOSS_FUNCTIONS.items() if loss in LOSSES_OF_ADVANTAGES))
def test_a_first_step_leaves_out_rows_without_advantages_and_stays_the_same(tiny_llama, loss, monkeypatch):
    batch, taken = rl_batch(), []
    batch.batch["advantages"][2:7] = 0
    for own in (False, True):  # with old_log_probs every row is read
        engine = make_engine(tiny_llama, optim={"optimizer": "SGD", "lr": 1.0, "weight_decay": 0.0})
        actor = make_actor(engine, micro=2, policy_loss=PolicyLossConfig(loss_mode=loss), grad_clip=1e9)
        if own:
            batch.batch.pop("old_log_probs")
        else:
            batch.batch["old_log_probs"], _ = actor.compute_log_prob(batch)
        rows = rows_read(actor, monkeypatch)
        taken.append((actor.update_policy(batch), weights_of(engine), sum(rows)))
    (whole, moved, all_rows), (metrics, weights, some_rows) = taken
    assert (all_rows, some_rows) == (8, 3) and metrics["actor/grad_norm"][0] > 1e-3
    assert metrics == {name: pytest.approx(values, rel=1e-4, abs=1e-6) for name, values in whole.items()}
    assert all(abs(weights[name] - moved[name]).max() < 1e-5 for name in weights)


@pytest.mark.parametrize(
    "term", [{"entropy_coeff": 0.01}, {"calculate_entropy": True}, {"use_kl_loss": True},
             {"auxiliary_losses": {"pull": {"coef": 1.0}}}, {"policy_loss": PolicyLossConfig(loss_mode="kl_cov")}],
    ids=lambda term: next(iter(term)),
)  # fmt: skip
def test_a_first_step_with_further_terms_reads_every_row(tiny_llama, term, monkeypatch):
    monkeypatch.setitem(_AUXILIARY_LOSSES, "pull", Pull)
    batch, actor = rl_batch(), make_actor(make_engine(tiny_llama), **term)
    batch.batch["advantages"][2:7] = 0
    batch.batch.pop("old_log_probs")
    rows = rows_read(actor, monkeypatch)
    actor.update_policy(batch)
    assert rows[-1] == 8


def test_a_replaced_loss_reads_every_row(tiny_llama, monkeypatch):
    vanilla = LOSS_FUNCTIONS["vanilla"]
    monkeypatch.setitem(LOSS_FUNCTIONS, "vanilla", lambda inputs, config: vanilla(inputs, config))
    batch, actor = rl_batch(), make_actor(make_engine(tiny_llama))
    batch.batch["advantages"][2:7] = 0
    batch.batch.pop("old_log_probs")
    rows = rows_read(actor, monkeypatch)
    actor.update_policy(batch)
    assert rows == [8]


def test_a_first_step_without_any_advantage_keeps_a_row(tiny_llama):
    batch = rl_batch()
    batch.batch.pop("old_log_probs")
    batch.batch["advantages"].zero_()
    assert update(tiny_llama, batch)[0]["actor/grad_norm"] == [0.0]


def test_a_nan_advantage_is_counted_and_changes_no_bit(tiny_llama):
    batch = rl_batch()
    batch.batch["advantages"][0, 0] = float("nan")
    engine = make_engine(tiny_llama)
    before = weights_of(engine)
    metrics = make_actor(engine, mini=4, micro=2).update_policy(batch)
    assert metrics["actor/nonfinite_steps"] == [1]
    assert len(metrics["actor/grad_norm"]) == 1
    changed = weights_of(engine)
    assert any((changed[n] != before[n]).any() for n in before)
    batch.batch["advantages"][5, 0] = float("nan")
    engine = make_engine(tiny_llama)
    assert make_actor(engine, mini=4, micro=2).update_policy(batch)["actor/nonfinite_steps"] == [2]
    assert all((w == before[n]).all() for n, w in weights_of(engine).items())


def test_a_batch_without_counted_tokens_changes_no_bit(tiny_llama):
    batch = rl_batch()
    batch.batch["response_mask"] = torch.zeros_like(batch.batch["response_mask"])
    engine = make_engine(tiny_llama)
    before = weights_of(engine)
    assert make_actor(engine).update_policy(batch) == {"actor/nonfinite_steps": [0], "actor/empty_steps": [1]}
    assert all((w == before[n]).all() for n, w in weights_of(engine).items())


def test_missing_columns_temperature_and_sizes_are_named(tiny_llama):
    actor = make_actor(make_engine(tiny_llama), use_kl_loss=True)
    batch = rl_batch()
    batch.batch.pop("ref_log_prob")
    with pytest.raises(ValueError, match="ref_log_prob"):
        actor.update_policy(batch)
    batch.meta_info.pop("temperature")
    with pytest.raises(ValueError, match="temperature"):
        actor.compute_log_prob(batch)
    with pytest.raises(ValueError, match="ppo_micro_batch_size_per_gpu.* forward_micro.* log_prob_use_dynamic_bsz"):
        micro_batches(rl_batch(), rows=None, tokens=None, whole_groups=False)


def test_cuts_along_groups_keep_groups_whole():
    batch = rl_batch()
    batch.batch["group_index"] = torch.tensor([3, 3, 3, 0, 0, 1, 1, 1])
    assert groups_of(batch.batch["group_index"]) == [[0, 1, 2], [3, 4], [5, 6, 7]]
    assert join_units([[0, 1, 2], [3, 4], [5, 6, 7]], [3, 2, 3], 5) == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert join_units([[0, 1, 2], [3, 4]], [3, 2], 2) == [[0, 1, 2], [3, 4]]
    parts = [part for part, _ in micro_batches(batch, rows=5, tokens=None, whole_groups=True)]
    assert parts == [[0, 1, 2, 3, 4], [5, 6, 7]]
    columns, first = batch.batch, [0, 0, 0, 3, 3, 5, 5, 5]
    mask, responses = columns["attention_mask"], columns["responses"].shape[1]
    for column in (columns["input_ids"], mask):  # groups of one prompt
        column[:, :-responses] = column[first, :-responses]
    columns["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    lengths, answers = mask.sum(-1), mask[:, -responses:].sum(-1)
    for budget, reads_answers in ((lengths[[0, 3]].sum(), False),
                                  (lengths[[0, 3]].sum() + answers[[1, 2, 4]].sum(), True)):
        for tokens, joined in ((int(budget), True), (int(budget) - 1, False)):
            parts = micro_batches(batch, rows=None, tokens=tokens, whole_groups=True, reads_answers=reads_answers)
            assert ([0, 1, 2, 3, 4] in [part for part, _ in parts]) == joined


class Caching(AuxiliaryLoss):
    """Needs the keys and values of the policy's forward, which one loss can have."""

    needs_cache = True

    def __init__(self, settings, config, engine):
        pass

    def backward(self, batch, scale):
        return {}


def test_the_advice_about_losses_and_cuts_helps(tiny_llama, monkeypatch):
    engine = make_engine(tiny_llama)
    with pytest.raises(ValueError, match="ppo_micro_batch_size_per_gpu,.* nor use_dynamic_bsz=true"):
        make_actor(engine, micro=None).update_policy(rl_batch())
    for fix in ({"micro": 8}, {"micro": None, "use_dynamic_bsz": True}):
        assert make_actor(engine, **fix).update_policy(rl_batch())
    lacking = rl_batch()
    del lacking.batch["ref_log_prob"]
    with pytest.raises(ValueError, match="set the key to false"):
        make_actor(engine, use_kl_loss=True).update_policy(lacking)
    assert make_actor(engine, use_kl_loss=False).update_policy(lacking)
    for name in ("one", "two"):
        monkeypatch.setitem(_AUXILIARY_LOSSES, name, Caching)
    with pytest.raises(ValueError, match="set actor_rollout_ref.actor.auxiliary_losses.two.coef=0"):
        make_actor(engine)
    assert len(make_actor(engine, auxiliary_losses={"two": {"coef": 0}}).auxiliary_losses) == 1
