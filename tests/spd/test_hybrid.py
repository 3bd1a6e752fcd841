"""L, hybrid contexts, counted positions and draws of judged blocks, by hand."""

import pytest
import torch

from recipe.spd.rollout.hybrid import counted_positions, hybrid_of, sample_actions, uniform_draws
from recipe.spd.scorer.bernoulli_policy import action_log_probs

EOS = {2}
DRAFT, TARGET = [10, 11, 12, 13], [10, 21, 12, 23, 24]  # mismatches at positions 1 and 3


@pytest.mark.parametrize(
    "actions, length, tokens, on_path, reached, counted",
    [
        ([1, 0, 1, 1], 1, (10, 21), True, 2, [0, 1, 0, 0]),  # first mismatch rejected: the target's own path
        ([1, 1, 1, 0], 3, (10, 11, 12, 23), False, 4, [0, 1, 0, 1]),
        ([1, 1, 1, 1], 4, (10, 11, 12, 13, 24), False, 4, [0, 1, 0, 1]),  # all accepted: the bonus token
        ([0, 1, 0, 1], 4, (10, 11, 12, 13, 24), False, 4, [0, 1, 0, 1]),  # matches count as accepted anyway
    ],
)
def test_hybrid_by_hand(actions, length, tokens, on_path, reached, counted):
    hybrid = hybrid_of(DRAFT, TARGET, actions, EOS)
    assert (hybrid.effective_len, hybrid.tokens, hybrid.on_target_path) == (length, tokens, on_path)
    assert hybrid.ended is False and hybrid.reached == reached
    assert counted_positions(DRAFT, TARGET, reached, "judged") == counted
    assert counted_positions(DRAFT, TARGET, reached, "all") == [0, 1, 0, 1]


def test_nothing_accepted_is_the_targets_own_token():
    hybrid = hybrid_of([10, 11], [20, 11, 12], [0, 1], EOS)
    assert (hybrid.effective_len, hybrid.tokens, hybrid.on_target_path, hybrid.reached) == (0, (20,), True, 1)


def test_an_accepted_end_token_ends_the_answer():
    hybrid = hybrid_of([10, 2, 12], [20, 21, 22, 23], [1, 1, 1], EOS)
    assert (hybrid.effective_len, hybrid.tokens, hybrid.ended, hybrid.reached) == (2, (10,), True, 2)
    assert counted_positions([10, 2, 12], [20, 21, 22, 23], 2, "judged") == [1, 1, 0]
    corrected = hybrid_of([10, 11], [20, 2, 22], [1, 0], EOS)
    assert (corrected.effective_len, corrected.tokens, corrected.ended) == (1, (10,), True)


def test_actions_follow_the_tempered_probability_and_their_log_probs_too():
    z, temperature = torch.tensor([[0.4, -1.2]]), 2.0
    draws = uniform_draws(1, 1, [5], [2], 40_000, 2)
    actions = sample_actions(z, draws, temperature)
    p = torch.sigmoid(z / temperature)
    assert torch.allclose(actions.float().mean(1), p, atol=0.01)
    log_p = action_log_probs(z[:, None], actions, temperature)
    expected = torch.where(actions == 1, p.log()[:, None], (1 - p).log()[:, None])
    assert torch.allclose(log_p, expected, atol=1e-6)
    assert sample_actions(z, None, temperature).tolist() == [[[1, 0]]]


def test_draws_depend_on_seed_step_and_row_not_on_neighbours_or_width():
    both = uniform_draws(42, 3, [10, 11], [2, 4], 3, 4)
    alone = uniform_draws(42, 3, [11], [4], 3, 6)
    assert torch.equal(both[1], alone[0, :, :4])
    assert not torch.equal(both[1], uniform_draws(42, 4, [11], [4], 3, 4)[0])
    assert not torch.equal(both[1], uniform_draws(43, 3, [11], [4], 3, 4)[0])
