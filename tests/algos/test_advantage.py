"""Advantages: by hand, against per-sample loops, by invariance."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl.trainer.ppo.core_algos import estimate_advantages

MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
INDEX = np.array(["a", "a", "a", "b", "b", "b"], dtype=object)


def per_sample(advantages, mask=MASK):
    """The one value that each row holds on its counted tokens; checks that padding holds 0."""
    assert torch.all(advantages[mask == 0] == 0)
    first = advantages[:, 0]
    assert torch.allclose(advantages, first[:, None] * mask)
    return first.tolist()


def on_last(scores, mask=MASK):
    """Scores [B] on the last counted token of each row."""
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(len(mask)), mask.sum(-1) - 1] = torch.tensor(scores, dtype=torch.float32)
    return rewards


def run(name, scores, mask=MASK, index=INDEX, **kwargs):
    inputs = {"token_level_rewards": on_last(scores, mask), "response_mask": mask, "index": index, **kwargs}
    return estimate_advantages(name, inputs)


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"])
def test_equal_scores_give_no_advantage(name):
    advantages, _ = run(name, [0.1, 0.1, 0.1, 0.7, 0.7, 0.7])
    assert advantages.abs().max() < 1e-6


def test_passk_refuses_a_group_of_one():
    with pytest.raises(ValueError, match="rollout.n >= 2"):
        run("grpo_passk", [1, 0, 0, 1, 1, 0], index=np.array(["a", "a", "a", "b", "b", "c"], dtype=object))


def test_missing_input_is_named():
    with pytest.raises(ValueError, match="adv_estimator='gae' needs values"):
        run("gae", [1, 0, 0, 1, 1, 0], gamma=1.0, lam=1.0)


def test_reinforce_plus_plus_steps_over_tool_tokens():
    inputs = {
        "token_level_rewards": torch.tensor([[0.5, 5.0, 1.0]]), "response_mask": torch.tensor([[1, 0, 1]]),
        "config": SimpleNamespace(gamma=0.5),
    }  # fmt: skip
    _, returns = estimate_advantages("reinforce_plus_plus", inputs)
    assert (returns[0, 0].item(), returns[0, 2].item()) == (0.5 + 0.5 * 1.0, 1.0)


def test_gpg_scales_by_the_share_of_samples_with_a_gradient():
    # every group is mixed, all 6 samples have a gradient: scale 1
    assert per_sample(run("gpg", [1, 0, 0, 1, 1, 0])[0]) == pytest.approx([2 / 3, -1 / 3, -1 / 3, 1 / 3, 1 / 3, -2 / 3])
    # group b is all right, then all wrong: 3 of 6 samples have a gradient, scale 2
    for verdict in (1, 0):
        advantages, _ = run("gpg", [1, 0, 0, verdict, verdict, verdict])
        assert per_sample(advantages) == pytest.approx([4 / 3, -2 / 3, -2 / 3, 0, 0, 0])
