"""The loss and the gradient of a batch are the same however it is cut: micro-batches, token budgets, ranks, packing.

Not covered: rollout_is_batch_normalize in bypass_mode with loss_type=reinforce (the mean weight is that of the
micro-batch) and CUDA ranks.
"""

import dataclasses

import numpy as np
import pytest
import torch

from tests.helpers.engines import make_engine
from tests.helpers.ranks import mean_metrics, run_ranks
from verl.config.actor import LOSS_AGG_MODES, PolicyLossConfig
from verl.config.model import PluginConfig
from verl.protocol import DataProto
from verl.training.actor import DataParallelPPOActor
from verl.training.actor.dp_actor import _token_keys
from verl.training.critic import DataParallelPPOCritic
from verl.training.parallel.sharding import full_tensor
from verl.training.policy import get_policy
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig

P, R, N, ROWS = 6, 5, 4, 16
PROMPTS, ANSWERS = [6, 1, 3, 2], [[5, 0, 2, 5], [1, 1, 4, 2], [5, 5, 5, 3], [1, 2, 1, 1]]
BUDGET = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 23}  # 8 forwards of rank 0's rows, 5 of rank 1's
#: cut -> (settings of actor or critic, model.use_remove_padding, actor.share_prompt_forward)
CUTS = {
    "whole": ({}, False, False),
    "rows": ({"ppo_micro_batch_size_per_gpu": 3}, False, False),
    "tokens": (BUDGET, False, False),
    "rows packed": ({"ppo_micro_batch_size_per_gpu": 3}, True, False),
    "tokens packed": (BUDGET, True, False),
    "rows shared": ({"ppo_micro_batch_size_per_gpu": 4}, False, True),
    "tokens shared": (BUDGET, True, True),
}
#: losses that choose tokens over the whole mini-batch; the others are linear in its tokens
CHOICES = ["clip_cov", "kl_cov"]
MODES = {"actor": [*LOSS_AGG_MODES, *CHOICES], "critic": list(LOSS_AGG_MODES)}
OF_CRITIC = [cut for cut, (_, _, shared) in CUTS.items() if not shared]


class Keeps(torch.optim.SGD):
    """An optimizer that notes the exchanged gradient and changes nothing."""

    def step(self):
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self.seen = [full_tensor(p.grad).numpy().copy() for p in trained]


def ragged_batch() -> DataProto:
    """Four groups of four rows; prompts of 1 to 6 tokens, answers of 0 to 5, a hole in the mask; [16, 11]."""
    g = torch.Generator().manual_seed(3)
    ids, mask = torch.zeros(ROWS, P + R, dtype=torch.int64), torch.zeros(ROWS, P + R, dtype=torch.int64)
    for row in range(ROWS):
        asked, answered = PROMPTS[row // N], ANSWERS[row // N][row % N]
        if row % N == 0:
            prompt = torch.randint(5, 64, (asked,), generator=g)
        ids[row, P - asked : P] = prompt
        ids[row, P : P + answered] = torch.randint(5, 64, (answered,), generator=g)
        mask[row, P - asked : P + answered] = 1
    counted = mask[:, P:].clone()
    counted[::5, 1] = 0  # such as a token that a tool wrote
    noise = {name: torch.randn(ROWS, R, generator=g) for name in ("advantages", "returns", "old", "ref", "values")}
    return DataProto.from_dict(
        tensors={
            "input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "responses": ids[:, P:], "response_mask": counted, "group_index": torch.arange(ROWS) // N,
            "advantages": noise["advantages"], "old_log_probs": -4.2 + 0.2 * noise["old"],
            "ref_log_prob": -4.1 + 0.2 * noise["ref"], "returns": noise["returns"], "values": 0.3 * noise["values"],
        },
        meta_info={"temperature": 0.8},
    )  # fmt: skip


def recording(engine):
    engine.optimizer = Keeps(engine.module.parameters(), lr=0.0)
    return engine


def first_step(batch: DataProto) -> DataProto:
    """The batch without old log-probs; of its first 8 rows one has advantages, of the others 4: one group of each."""
    batch = DataProto(batch.batch.clone(), {}, dict(batch.meta_info))
    batch.batch.pop("old_log_probs")
    batch.batch["advantages"][[*range(7), *range(12, 16)]] = 0
    return batch


def actor_of(engine, cut, rows=ROWS, **config):
    """The actor that takes `rows` in one step, cut in this way."""
    settings, packed, shared = CUTS[cut]
    policy = get_policy("causal_lm", chunk_tokens=7)
    policy.set_forward(remove_padding=packed, share_prompt=shared)
    sizes = {"ppo_mini_batch_size": rows, "ppo_micro_batch_size_per_gpu": ROWS, "rollout_n": N}
    config = FSDPActorConfig(**{**sizes, "share_prompt_forward": shared, **config, **settings})
    return DataParallelPPOActor(config, engine, policy)


def actor_step(engine, share, mode, cut, terms=True):
    """(metrics, gradients) of one update on `share`; `terms`: with entropy and KL losses."""
    loss = {"policy_loss": PolicyLossConfig(
        loss_mode=mode, clip_cov_ratio=0.1, clip_cov_lb=0.0, clip_cov_ub=9.0, kl_cov_ratio=0.1, ppo_kl_coef=5.0
    )} if mode in CHOICES else {"loss_agg_mode": mode}  # fmt: skip
    added = {"entropy_coeff": 0.01 * terms, "use_kl_loss": terms, "kl_loss_coef": 0.1}
    metrics = actor_of(engine, cut, len(share), grad_clip=1e6, **loss, **added).update_policy(share)
    return {name: value[0] for name, value in metrics.items()}, engine.optimizer.seen


def critic_step(engine, share, mode, cut):
    settings, packed, _ = CUTS[cut]
    engine.model_config = dataclasses.replace(engine.model_config, use_remove_padding=packed)
    config = FSDPCriticConfig(**{
        "ppo_mini_batch_size": len(share), "ppo_micro_batch_size_per_gpu": ROWS, "forward_micro_batch_size_per_gpu": 8,
        "grad_clip": 1e6, "loss_agg_mode": mode, "cliprange_value": 0.2, **settings,
    })  # fmt: skip
    metrics = DataParallelPPOCritic(config, engine).update_critic(share)
    return {name: value[0] for name, value in metrics.items()}, engine.optimizer.seen


def engines(path):
    return {"actor": recording(make_engine(path)),
            "critic": recording(make_engine(path, loader=PluginConfig(name="value_head")))}  # fmt: skip


def on_ranks(role, mode):
    """The cuts tried on two ranks: every one in one mode, the unlike ones in the others."""
    if mode != "token-mean":
        return ["tokens", "tokens shared" if role == "actor" else "tokens packed"]
    return list(CUTS) if role == "actor" else OF_CRITIC


def on_two_ranks(rank, world_size, path, folder):
    """Metrics of this rank by (role, mode, cut); rank 0 leaves the gradients in files."""
    made, results = engines(path), {}
    share = ragged_batch()[rank * ROWS // world_size : (rank + 1) * ROWS // world_size]
    poisoned = DataProto(share.batch.clone(), {}, {})
    if rank == 1:
        poisoned.batch["returns"][2, 0] = float("nan")
    made["critic"].optimizer.seen = None
    results["poisoned"] = critic_step(made["critic"], poisoned, "token-mean", "rows")
    first = first_step(ragged_batch())[rank * ROWS // world_size : (rank + 1) * ROWS // world_size]
    for cut in ("tokens", "tokens shared"):
        results["first", cut], gradients = actor_step(made["actor"], first, "token-mean", cut, terms=False)
        if rank == 0:
            np.savez(f"{folder}/first {cut}.npz", *gradients)
    for role, step in (("actor", actor_step), ("critic", critic_step)):
        for mode in MODES[role]:
            for cut in on_ranks(role, mode):
                results[role, mode, cut], gradients = step(made[role], share, mode, cut)
                if rank == 0:
                    np.savez(f"{folder}/{role} {mode} {cut}.npz", *gradients)
    return results


@pytest.fixture(scope="module")
def of_two(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gradients")
    return run_ranks(on_two_ranks, 2, tiny_llama, str(folder)), folder


@pytest.fixture(scope="module")
def of_one(tiny_llama):
    """Engines of one rank, with the steps on the whole padded batch that every other cut is compared with."""
    made, batch = engines(tiny_llama), ragged_batch()
    whole = {("actor", mode): actor_step(made["actor"], batch, mode, "whole") for mode in MODES["actor"]}
    whole |= {("critic", mode): critic_step(made["critic"], batch, mode, "whole") for mode in LOSS_AGG_MODES}
    yield made, whole


def same(results, expected):
    metrics, gradients = results
    assert metrics == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    assert len(gradients) == len(expected[1])
    scale = max(np.abs(gradient).max() for gradient in expected[1])
    for a, b in zip(gradients, expected[1], strict=True):
        assert np.abs(a - b).max() <= 1e-5 * scale


@pytest.mark.parametrize("mode", MODES["actor"])
@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut != "whole"])
def test_the_actors_step_does_not_depend_on_the_cut(of_one, mode, cut):
    made, whole = of_one
    same(actor_step(made["actor"], ragged_batch(), mode, cut), whole["actor", mode])


def log_probs(engine, cut, batch=None):
    """(log-probs, entropies) of the batch without an update, each [16, 5]; or of another one."""
    return actor_of(engine, cut).compute_log_prob(ragged_batch() if batch is None else batch, calculate_entropy=True)


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut != "whole"])
def test_log_probs_do_not_depend_on_the_cut(of_one, cut):
    engine = of_one[0]["actor"]
    for results, expected in zip(log_probs(engine, cut), log_probs(engine, "whole"), strict=True):
        assert expected.abs().sum() > 10
        torch.testing.assert_close(results, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("cut", [cut for cut in OF_CRITIC if cut != "whole"])
def test_the_critics_step_does_not_depend_on_the_cut(of_one, mode, cut):
    made, whole = of_one
    same(critic_step(made["critic"], ragged_batch(), mode, cut), whole["critic", mode])


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("role", "mode"), [(role, mode) for role in MODES for mode in MODES[role]])
def test_two_ranks_take_the_step_of_one_however_each_cuts_its_rows(of_one, of_two, role, mode):
    ranks, folder = of_two
    for cut in on_ranks(role, mode):
        metrics = mean_metrics([of_rank[role, mode, cut] for of_rank in ranks])
        gradients = list(np.load(folder / f"{role} {mode} {cut}.npz").values())
        same((metrics, gradients), of_one[1][role, mode])


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("cut", ["tokens", "tokens shared"])
def test_two_ranks_leave_out_rows_without_advantages_together(of_one, of_two, cut):
    ranks, folder = of_two
    metrics = mean_metrics([of_rank["first", cut] for of_rank in ranks])
    gradients = list(np.load(f"{folder}/first {cut}.npz").values())
    same((metrics, gradients), actor_step(of_one[0]["actor"], first_step(ragged_batch()), "token-mean", "whole", False))


@pytest.mark.process
@pytest.mark.slow
def test_a_bad_value_loss_on_one_rank_is_a_step_of_neither(of_two):
    for of_rank in of_two[0]:
        metrics, gradients = of_rank["poisoned"]
        assert metrics["critic/nonfinite_steps"] == 1 and gradients is None


def test_the_modes_weigh_the_same_tokens_differently(of_one):
    """Else the comparisons above would say nothing about the mode."""
    whole = of_one[1]
    for role, name in (("actor", "actor/pg_loss"), ("critic", "critic/vf_loss")):
        assert len({round(whole[role, mode][0][name], 4) for mode in MODES[role]}) == len(MODES[role])


def test_drawn_tokens_are_spread_evenly_and_change_with_the_mini_batch():
    ids = torch.randint(5, 99, (2000, 12), generator=torch.Generator().manual_seed(0))
    keys = _token_keys(ids, 5, seed=42)
    assert keys.shape == (2000, 5) and 0 <= keys.min() and keys.max() < 1
    assert torch.histc(keys, 10, 0, 1).sub(1000).abs().max() < 150  # 5 standard deviations
    assert torch.corrcoef(keys.T).sub(torch.eye(5)).abs().max() < 0.12
    assert torch.corrcoef(torch.stack([keys.flatten(), _token_keys(ids, 5, seed=43).flatten()]))[0, 1].abs() < 0.05
