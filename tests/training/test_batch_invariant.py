"""actor.batch_invariant: a sample's log-probs are the same bits whatever else is in the batch."""

import numpy as np
import pytest
import torch

from tests.helpers.engines import leave_group, make_actor, make_engine, rl_batch
from tests.helpers.models import save_tiny_llama
from tests.helpers.ranks import run_ranks
from verl.protocol import DataProto
from verl.training.actor import DataParallelPPOActor
from verl.training.policy import get_policy
from verl.workers.config import FSDPActorConfig

CUTS = ({"micro_batch_size": 1}, {"micro_batch_size": 3}, {"micro_batch_size": 16},
        {"use_dynamic_bsz": True, "max_token_len": 30})  # fmt: skip


def invariant(path, **config):
    """An actor whose policy leaves padding out, as a worker sets it up."""
    policy, settings = get_policy("causal_lm"), {"ppo_mini_batch_size": 16, "ppo_micro_batch_size_per_gpu": 8}
    policy.set_forward(remove_padding=True, share_prompt=False)
    settings |= {"rollout_n": 1, "batch_invariant": True, **config}
    return DataParallelPPOActor(FSDPActorConfig(**settings), make_engine(path), policy)


def computed(actor, batch, **cut):
    rows = DataProto(batch.batch.clone(), {}, {"temperature": 1.0, **cut})
    return actor.compute_log_prob(rows)[0]


def test_log_probs_do_not_depend_on_the_cut_the_padding_or_the_other_rows(tmp_path):
    actor = invariant(save_tiny_llama(tmp_path / "m", hidden=128))
    batch = rl_batch(rows=16, prompt=9, response=12)
    expected = computed(actor, batch, micro_batch_size=8)
    assert all(computed(actor, batch, **cut).equal(expected) for cut in CUTS)
    wide = DataProto(batch.batch.clone(), {}, {})
    for name in ("input_ids", "attention_mask", "position_ids"):
        wide.batch[name] = torch.nn.functional.pad(wide.batch[name], (5, 0))
    assert computed(actor, wide, micro_batch_size=4).equal(expected)
    some = torch.tensor([7, 2, 11])
    assert computed(actor, batch.select_idxs(some), micro_batch_size=2).equal(expected[some])
    actor.config = type(actor.config)(**{**vars(actor.config), "batch_invariant": False})
    differs = [computed(actor, batch, **cut) for cut in CUTS]
    assert any(not other.equal(expected) for other in differs)  # without the setting, bits depend on the cut
    assert all((other - expected).abs().max() < 1e-5 for other in differs)
    leave_group()


def test_the_first_update_sees_the_old_log_probs(tmp_path):
    actor = invariant(save_tiny_llama(tmp_path / "m"))
    batch = rl_batch(rows=16)
    batch.batch["response_mask"] = batch.batch["attention_mask"][:, -6:].clone()
    batch.meta_info["temperature"] = 1.0
    batch.batch["old_log_probs"] = computed(actor, batch, micro_batch_size=5)
    assert actor.update_policy(batch)["actor/logprob_drift_max"] == [0.0]
    leave_group()


def on_rank(rank, ranks, path):
    actor, batch = invariant(path), rl_batch(rows=8)
    share = 8 // ranks
    own = batch.select_idxs(torch.arange(rank * share, (rank + 1) * share))
    return computed(actor, own, micro_batch_size=3).numpy()


@pytest.mark.process
@pytest.mark.slow
def test_log_probs_do_not_depend_on_the_ranks(tmp_path):
    path = save_tiny_llama(tmp_path / "m")
    (alone,), parts = run_ranks(on_rank, 1, path), run_ranks(on_rank, 2, path)
    assert np.array_equal(np.concatenate(parts), alone)


def test_what_computes_samples_together_is_refused(tmp_path):
    given = {"rollout_n": 1, "batch_invariant": True}
    with pytest.raises(ValueError, match="share_prompt_forward=true computes samples together"):
        FSDPActorConfig(**given, share_prompt_forward=True)
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size=2 splits samples"):
        FSDPActorConfig(**given, ulysses_sequence_parallel_size=2)
    engine = make_engine(save_tiny_llama(tmp_path / "m"))
    with pytest.raises(ValueError, match="needs forwards without padding"):
        make_actor(engine, batch_invariant=True)
    leave_group()
