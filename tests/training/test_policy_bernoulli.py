"""Bernoulli policy: values by hand, gradients of shared forwards against plain ones."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import recipe.spd.scorer.bernoulli_policy  # noqa: F401  (registers the policy)
from verl.training.policy import get_policy


class TableModel(nn.Module):
    """z = weight * sum of the first columns' embeddings: [B, gamma] from input_ids [B, P]; counts its calls."""

    def __init__(self, gamma: int):
        super().__init__()
        self.table = nn.Embedding(16, gamma)
        self.rows_seen = 0

    def forward(self, input_ids, attention_mask, position_ids, spd_layout):
        assert input_ids.shape == attention_mask.shape == position_ids.shape
        self.rows_seen += len(input_ids)
        return (self.table(input_ids) * attention_mask[..., None]).sum(1)


class FixedScores(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.z = nn.Parameter(torch.tensor(z))

    def forward(self, input_ids, attention_mask, position_ids, spd_layout):
        return self.z.expand(len(input_ids), -1)


def batch_of(responses, prompt_len=3, group_index=None, input_ids=None):
    rows, gamma = len(responses), len(responses[0])
    ids = torch.arange(rows * prompt_len).reshape(rows, -1) % 16 if input_ids is None else input_ids
    columns = {
        "responses": torch.tensor(responses),
        "input_ids": ids,
        "attention_mask": torch.ones(rows, prompt_len + gamma, dtype=torch.long),
        "position_ids": torch.arange(prompt_len + gamma).expand(rows, -1),
        "spd_layout": torch.zeros(rows, 5, dtype=torch.long),
    }
    if group_index is not None:
        columns["group_index"] = torch.tensor(group_index)
    return TensorDict(columns, batch_size=rows)


def test_log_probs_and_entropy_by_hand():
    z, t = 1.5, 2.0
    log_probs, entropy = get_policy("bernoulli").log_probs(
        FixedScores([z, z, 50.0]), batch_of([[1, 0, 1]]), temperature=t, with_entropy=True
    )
    p = 1 / (1 + math.exp(-z / t))
    assert log_probs[0, :2].tolist() == pytest.approx([math.log(p), math.log(1 - p)], rel=1e-6)
    by_hand = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert entropy[0, :2].tolist() == pytest.approx([by_hand, by_hand], rel=1e-6)
    assert abs(log_probs[0, 2].item()) < 1e-9 and abs(entropy[0, 2].item()) < 1e-8


def test_shared_forward_gives_the_same_values_and_gradients_with_fewer_rows():
    torch.manual_seed(0)
    model = TableModel(gamma=2)
    actions = torch.randint(0, 2, (6, 2)).tolist()
    ids = torch.randint(0, 16, (2, 3)).repeat_interleave(3, 0)
    batch = batch_of(actions, group_index=[7, 7, 7, 4, 4, 4], input_ids=ids)
    results = []
    for policy in (get_policy("bernoulli"), get_policy("bernoulli", share=True)):
        model.zero_grad()
        model.rows_seen = 0
        log_probs, entropy = policy.log_probs(model, batch, temperature=0.9, with_entropy=True)
        (log_probs.sum() + entropy.square().sum()).backward()
        results.append((log_probs.detach(), entropy.detach(), model.table.weight.grad.clone(), model.rows_seen))
    plain, shared = results
    assert (plain[3], shared[3]) == (6, 2)
    torch.testing.assert_close(shared[:3], plain[:3], rtol=1e-5, atol=1e-6)  # sums in another order


def test_groups_of_separate_rows_are_refused():
    with pytest.raises(ValueError, match="not adjacent"):
        get_policy("bernoulli", share=True).log_probs(
            TableModel(1), batch_of([[1], [1], [1]], group_index=[0, 1, 0]), temperature=1.0, with_entropy=False
        )


def test_short_drafts_are_padded_and_longer_ones_refused():
    policy = get_policy("bernoulli")
    log_probs, _ = policy.log_probs(FixedScores([0.0]), batch_of([[1, 1]]), temperature=1.0, with_entropy=False)
    assert log_probs[0].tolist() == pytest.approx([math.log(0.5), 0.0], abs=1e-6)
    with pytest.raises(ValueError, match="max_response_length"):
        policy.log_probs(FixedScores([0.0, 0.0]), batch_of([[1]]), temperature=1.0, with_entropy=False)


def test_unknown_policy_and_zero_temperature_are_named():
    with pytest.raises(ValueError, match="bernoulli"):
        get_policy("bernouli")
    with pytest.raises(ValueError, match="temperature=0"):
        get_policy("bernoulli").log_probs(FixedScores([0.0]), batch_of([[1]]), temperature=0, with_entropy=False)
