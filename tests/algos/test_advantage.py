"""Advantages: by hand, against per-sample loops, by invariance."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import AdvantageEstimator, estimate_advantages, get_adv_estimator_fn, register_adv_est

MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
INDEX = np.array(["a", "a", "a", "b", "b", "b"], dtype=object)


def on_last(scores, mask=MASK):
    """Scores [B] on the last counted token of each row."""
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(len(mask)), mask.sum(-1) - 1] = torch.tensor(scores, dtype=torch.float32)
    return rewards


def run(name, scores, mask=MASK, index=INDEX, **kwargs):
    inputs = {"token_level_rewards": on_last(scores, mask), "response_mask": mask, "index": index, **kwargs}
    return estimate_advantages(name, inputs)


def per_sample(advantages, mask=MASK):
    """The one value that each row holds on its counted tokens; checks that padding holds 0."""
    assert torch.all(advantages[mask == 0] == 0)
    first = advantages[:, 0]
    assert torch.allclose(advantages, first[:, None] * mask)
    return first.tolist()


def test_grpo_by_hand():
    # group a: mean 1/3, unbiased std sqrt((4/9 + 1/9 + 1/9) / 2) = 0.57735
    advantages, returns = run("grpo", [1, 0, 0, 1, 1, 0])
    assert per_sample(advantages) == pytest.approx([1.1547, -0.57735, -0.57735, 0.57735, 0.57735, -1.1547], abs=1e-4)
    assert torch.equal(advantages, returns)


def test_grpo_without_std_only_centres():
    advantages, _ = run("grpo", [1, 0, 0, 3, 3, 0], norm_adv_by_std_in_grpo=False)
    assert per_sample(advantages) == pytest.approx([2 / 3, -1 / 3, -1 / 3, 1, 1, -2])


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"])
def test_equal_scores_give_no_advantage(name):
    advantages, _ = run(name, [0.1, 0.1, 0.1, 0.7, 0.7, 0.7])
    assert advantages.abs().max() < 1e-6


def test_a_sample_alone_keeps_its_score():
    index = np.array(["a", "b", "c", "d", "e", "f"], dtype=object)
    for name in ("grpo", "rloo", "opo"):
        assert per_sample(run(name, [1, 2, 3, 4, 5, 6], index=index)[0]) == pytest.approx([1, 2, 3, 4, 5, 6], rel=1e-5)


def test_rloo_subtracts_the_mean_of_the_others():
    advantages, _ = run("rloo", [1, 0, 0, 1, 1, 0])
    assert per_sample(advantages) == pytest.approx([1, -0.5, -0.5, 0.5, 0.5, -1])
    assert torch.equal(advantages, run("rloo_vectorized", [1, 0, 0, 1, 1, 0])[0])


def test_opo_weighs_the_baseline_by_length():
    # lengths 2, 1, 3: baseline a = (2*1 + 1*0 + 3*0)/6, b = (2*1 + 1*1 + 0)/6
    advantages, _ = run("opo", [1, 0, 0, 1, 1, 0])
    assert per_sample(advantages) == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.5, 0.5, -0.5])


def test_gpg_scales_by_the_share_of_samples_with_a_gradient():
    # every group is mixed, all 6 samples have a gradient: scale 1
    assert per_sample(run("gpg", [1, 0, 0, 1, 1, 0])[0]) == pytest.approx([2 / 3, -1 / 3, -1 / 3, 1 / 3, 1 / 3, -2 / 3])
    # group b is all right, then all wrong: 3 of 6 samples have a gradient, scale 2
    for verdict in (1, 0):
        advantages, _ = run("gpg", [1, 0, 0, verdict, verdict, verdict])
        assert per_sample(advantages) == pytest.approx([4 / 3, -2 / 3, -2 / 3, 0, 0, 0])


def test_passk_pays_only_the_leader():
    advantages, _ = run("grpo_passk", [3, 1, 0, 2, 2, 0], norm_adv_by_std_in_grpo=False)
    assert per_sample(advantages) == pytest.approx([2, 0, 0, 0, 0, 0])
    # std of (3, 1, 0) = 1.527525
    advantages, _ = run("grpo_passk", [3, 1, 0, 2, 2, 0])
    assert per_sample(advantages)[0] == pytest.approx(2 / 1.527525, rel=1e-4)


def test_passk_refuses_a_group_of_one():
    with pytest.raises(ValueError, match="rollout.n >= 2"):
        run("grpo_passk", [1, 0, 0, 1, 1, 0], index=np.array(["a", "a", "a", "b", "b", "c"], dtype=object))


def test_reinforce_plus_plus_discounts_then_whitens():
    rewards = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    inputs = {"token_level_rewards": rewards, "response_mask": mask, "config": SimpleNamespace(gamma=0.5)}
    advantages, returns = estimate_advantages("reinforce_plus_plus", inputs)
    assert returns.tolist() == [[0.5, 1.0, 0.0], [0.5, 1.0, 2.0]]
    counted = advantages[mask == 1]
    assert counted.mean().item() == pytest.approx(0, abs=1e-6)
    assert counted.std().item() == pytest.approx(1, abs=1e-4)
    assert advantages[0, 2] == 0


def test_reinforce_plus_plus_steps_over_tool_tokens():
    inputs = {
        "token_level_rewards": torch.tensor([[0.5, 5.0, 1.0]]), "response_mask": torch.tensor([[1, 0, 1]]),
        "config": SimpleNamespace(gamma=0.5),
    }  # fmt: skip
    _, returns = estimate_advantages("reinforce_plus_plus", inputs)
    assert (returns[0, 0].item(), returns[0, 2].item()) == (0.5 + 0.5 * 1.0, 1.0)


def test_reinforce_plus_plus_baseline_centres_groups_then_whitens():
    advantages, _ = run("reinforce_plus_plus_baseline", [1, 0, 0, 1, 1, 0])
    counted = advantages[MASK == 1]
    assert counted.mean().item() == pytest.approx(0, abs=1e-6)
    assert counted.std().item() == pytest.approx(1, abs=1e-4)
    # samples 1 and 2 had equal centred scores; one and the same shift applies to all
    assert advantages[1, 0] == advantages[2, 0]


def test_remax_subtracts_the_greedy_score():
    rewards = torch.tensor([[1.0, 2.0, 9.0]])
    mask = torch.tensor([[1, 1, 0]])
    inputs = {"token_level_rewards": rewards, "response_mask": mask, "reward_baselines": torch.tensor([0.5])}
    advantages, returns = estimate_advantages("remax", inputs)
    assert returns.tolist() == [[3.0, 2.0, 0.0]]
    assert advantages.tolist() == [[2.5, 1.5, 0.0]]


def test_gae_by_hand():
    # gamma 0.5, lam 0.5: delta = (0 + .5*2 - 1, 1 + 0 - 2) = (0, -1); A = (0 + .25*-1, -1); returns = A + V
    inputs = {
        "token_level_rewards": torch.tensor([[0.0, 1.0, 0.0]]), "values": torch.tensor([[1.0, 2.0, 7.0]]),
        "response_mask": torch.tensor([[1, 1, 0]]), "gamma": 0.5, "lam": 0.5,
    }  # fmt: skip
    advantages, returns = estimate_advantages("gae", inputs)
    assert returns[0, :2].tolist() == pytest.approx([0.75, 1.0])
    half = 2**-0.5  # two whitened values are +-1/sqrt(2)
    assert advantages[0].tolist() == pytest.approx([half, -half, 0.0], abs=1e-5)


def test_gae_steps_over_tool_tokens():
    """Counted tokens get the same with and without a stretch of tool tokens between them."""
    gamma, lam = 0.9, 0.8
    rewards, values = torch.tensor([[0.3, 0.0, 1.0]]), torch.tensor([[0.5, -0.2, 0.7]])
    plain = estimate_advantages("gae", {
        "token_level_rewards": rewards, "values": values, "response_mask": torch.ones(1, 3), "gamma": gamma, "lam": lam,
    })  # fmt: skip
    wide = torch.tensor([[0, 1, 3]])
    spread = estimate_advantages("gae", {
        "token_level_rewards": torch.zeros(1, 4).scatter(1, wide, rewards),
        "values": torch.full((1, 4), 5.0).scatter(1, wide, values),
        "response_mask": torch.tensor([[1, 1, 0, 1]]), "gamma": gamma, "lam": lam,
    })  # fmt: skip
    for a, b in zip(plain, spread, strict=True):
        assert torch.allclose(a, b.gather(1, wide), atol=1e-6)


def test_gae_with_one_counted_token_is_finite():
    inputs = {
        "token_level_rewards": torch.tensor([[1.0]]), "values": torch.tensor([[0.2]]),
        "response_mask": torch.tensor([[1]]), "gamma": 1.0, "lam": 1.0,
    }  # fmt: skip
    assert estimate_advantages("gae", inputs)[0].tolist() == [[0.0]]


def reference(name, scores, lengths, index):
    """Per-sample loops as one would write them on paper."""
    groups = {g: [i for i in range(len(index)) if index[i] == g] for g in index}
    out = []
    for i, g in enumerate(index):
        members = groups[g]
        values = [scores[j] for j in members]
        mean = sum(values) / len(values)
        std = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5 if len(values) > 1 else 0
        if len(values) == 1:
            out.append(scores[i])
        elif name == "grpo":
            out.append((scores[i] - mean) / (std + 1e-6))
        elif name == "rloo":
            out.append(scores[i] - sum(scores[j] for j in members if j != i) / (len(members) - 1))
        else:
            base = sum(lengths[j] * scores[j] for j in members) / sum(lengths[j] for j in members)
            out.append(scores[i] - base)
    return out


rows = st.lists(st.tuples(st.integers(0, 4), st.floats(-5, 5, width=32), st.integers(1, 4)), min_size=1, max_size=24)


@settings(max_examples=60, deadline=None)
@given(rows=rows, name=st.sampled_from(["grpo", "rloo", "opo"]))
def test_vectorised_groups_equal_the_loop(rows, name):
    index = np.array([f"u{g}" for g, _, _ in rows], dtype=object)
    scores, lengths = [float(s) for _, s, _ in rows], [n for _, _, n in rows]
    mask = (torch.arange(4)[None] < torch.tensor(lengths)[:, None]).long()
    got = per_sample(run(name, scores, mask, index)[0], mask)
    want = reference(name, scores, lengths, index.tolist())
    # A group of nearly equal scores divides a rounding by epsilon: compare where the spread is real.
    assert got == pytest.approx(want, rel=1e-3, abs=2e-3)


@settings(max_examples=30, deadline=None)
@given(rows=rows, seed=st.integers(0, 99))
def test_order_of_rows_does_not_matter(rows, seed):
    index = np.array([f"u{g}" for g, _, _ in rows], dtype=object)
    scores = [float(s) for _, s, _ in rows]
    mask = torch.ones(len(rows), 2, dtype=torch.int64)
    order = np.random.default_rng(seed).permutation(len(rows))
    straight = run("grpo", scores, mask, index)[0]
    shuffled = run("grpo", [scores[i] for i in order], mask, index[order])[0]
    assert torch.allclose(straight[torch.as_tensor(order)], shuffled, atol=1e-4)


def test_every_named_estimator_is_registered():
    for name in AdvantageEstimator:
        assert callable(get_adv_estimator_fn(name))
        assert get_adv_estimator_fn(name) is get_adv_estimator_fn(name.value)


def test_unknown_estimator_names_the_nearest():
    with pytest.raises(ValueError, match=r"algorithm.adv_estimator='grop' is unknown; did you mean 'grpo'\?"):
        get_adv_estimator_fn("grop")


def test_second_estimator_of_one_name_is_refused():
    with pytest.raises(ValueError, match="'grpo' is already registered"):

        @register_adv_est("grpo")
        def mine(token_level_rewards, response_mask):
            return token_level_rewards, token_level_rewards


def test_missing_input_is_named():
    with pytest.raises(ValueError, match="adv_estimator='gae' needs values"):
        run("gae", [1, 0, 0, 1, 1, 0], gamma=1.0, lam=1.0)


def test_own_estimator_needs_no_change_elsewhere():
    @register_adv_est("test_advantage_own")
    def own(token_level_rewards, response_mask, **kwargs):
        assert "index" in kwargs
        return token_level_rewards * 2, token_level_rewards

    assert run("test_advantage_own", [1, 0, 0, 0, 0, 0])[0].sum() == 2
    assert core_algos.get_adv_estimator_fn("test_advantage_own") is own
