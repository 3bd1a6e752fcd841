"""What the role works out before any process group exists."""

import pytest

from verl.roles.ranks import per_rank_sizes
from verl.workers.config import FSDPActorConfig


def actor(**keys):
    base = {"ppo_mini_batch_size": 6, "ppo_micro_batch_size": None, "ppo_micro_batch_size_per_gpu": 3}
    return FSDPActorConfig(**(base | keys))


def test_mini_batch_counts_samples_of_one_rank():
    given = actor()
    assert per_rank_sizes(given, "actor", n=4, ranks=3).ppo_mini_batch_size == 8  # 6 prompts x 4 / 3
    assert given.ppo_mini_batch_size == 6


def test_old_global_micro_batch_is_shared_out():
    sizes = per_rank_sizes(actor(ppo_micro_batch_size=8, ppo_micro_batch_size_per_gpu=None), "actor", n=1, ranks=2)
    assert sizes.ppo_micro_batch_size_per_gpu == 4
    assert sizes.ppo_micro_batch_size is None


def test_mini_batch_that_ranks_cannot_share_is_refused():
    with pytest.raises(ValueError, match="ppo_mini_batch_size=6 x rollout.n=1 gives 6 samples, which 4 ranks"):
        per_rank_sizes(actor(), "actor", n=1, ranks=4)
