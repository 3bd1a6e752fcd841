"""Drops, groups and shares of a batch, by hand."""

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo import batching
from verl.trainer.ppo.batching import DropCounts, balanced_order, drop_lost


def samples(groups: str, lost: str = "") -> DataProto:
    """One row a letter of `groups` (its uid); rows whose place in `lost` is an x are lost."""
    columns = {"uid": np.array(list(groups), dtype=object)}
    if lost:
        columns["__lost__"] = np.array([c == "x" for c in lost])
    number = torch.arange(len(groups))
    tensors = {"number": number, "response_mask": torch.ones(len(groups), 3, dtype=torch.int64)}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


def numbers(data: DataProto) -> list[int]:
    return data.batch["number"].tolist()


def test_response_mask_is_the_end_of_the_attention_mask():
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
    data = DataProto.from_dict({"attention_mask": mask, "responses": torch.zeros(2, 3)})
    assert batching.compute_response_mask(data).tolist() == [[1, 1, 0], [1, 0, 0]]


def test_prompts_without_a_greedy_answer_go_whole_and_count_by_themselves():
    data = samples("aaabbbccc", "x...x....")
    batching.mark_without_baseline(data, {"a": 0.5, "c": 0.0})
    data, counts = drop_lost(data, n=3, ranks=1, whole_groups=False)
    assert numbers(data) == [1, 2, 6, 7, 8]
    assert counts == DropCounts(requested=9, scored=5, lost=2, no_baseline=2)
    assert counts.metrics()["training/dropped_samples/no_baseline"] == 2
    assert counts.after_rewards(3, DropCounts(scored=2)).metrics()["training/dropped_samples"] == 7


@pytest.mark.parametrize(
    ("groups", "lost", "n", "ranks", "whole", "kept", "counts"),
    [
        ("aabb", "", 2, 2, False, [0, 1, 2, 3], {"scored": 4}),
        ("aaabbbccc", "x..xx....", 3, 1, False, [1, 2, 6, 7, 8], {"scored": 5, "lost": 3, "small_group": 1}),
        ("abc", "..x", 1, 1, False, [0, 1], {"scored": 2, "lost": 1}),  # one sample a prompt is no small group
        ("aabb", "xxxx", 2, 2, False, [], {"lost": 4}),
        # of three full groups of two, two ranks can share six samples, but not three whole groups
        ("aabbcc", "", 2, 2, False, [0, 1, 2, 3, 4, 5], {"scored": 6}),
        ("aabbcc", "", 2, 2, True, [0, 1, 2, 3], {"scored": 4, "uneven": 2}),
        # a group that is no longer full has to stay whole too
        ("aaabbbccc", "x........", 3, 2, False, [1, 2, 3, 4, 5], {"scored": 5, "lost": 1, "uneven": 3}),
    ],
)
def test_what_is_lost_alone_or_not_shared_evenly_goes(groups, lost, n, ranks, whole, kept, counts):
    data, counted = drop_lost(samples(groups, lost), n=n, ranks=ranks, whole_groups=whole)
    assert numbers(data) == kept and "__lost__" not in data.non_tensor_batch
    assert counted == DropCounts(requested=len(groups), **counts)


def test_counts_that_do_not_add_up_are_a_fault():
    with pytest.raises(RuntimeError, match="10 samples were requested, but 8 scored \\+ 1 dropped"):
        DropCounts(requested=10, scored=8, lost=1).metrics()


def test_fillers_complete_a_group_without_counting_anywhere():
    data = samples("aabbb")
    filled, own = batching.fill_groups(data, n=3)
    assert numbers(filled) == [0, 1, 0, 2, 3, 4]
    assert own.tolist() == [True, True, False, True, True, True]
    assert filled.batch["response_mask"].sum(-1).tolist() == [3, 3, 0, 3, 3, 3]
    assert data.batch["response_mask"].sum().item() == 15  # the data's own mask is untouched
    assert numbers(filled.select_idxs(own)) == numbers(data)


def test_rows_drawn_again_stand_in_groups_of_the_same_sizes():
    scores = torch.tensor([[0.0], [0.0], [1.0], [0.0], [0.0]])
    tensors = {"token_level_scores": scores, "attention_mask": torch.ones(5, 1), "group_index": torch.arange(5)}
    uid = np.array(["a", "a", "a", "b", "b"], dtype=object)
    batch = DataProto.from_dict(tensors, {"uid": uid, "name": np.arange(5).astype(object)})
    batching.resample_by_score(batch, {"reweight_method": "pow", "weight_pow": 2.0})
    assert batch.non_tensor_batch["name"].tolist() == [2] * 5  # the only row with a weight
    assert batch.non_tensor_batch["uid"].tolist() == uid.tolist()
    assert batch.batch["group_index"].tolist() == [0, 1, 2, 3, 4] and batch.meta_info["global_token_num"] == [1] * 5


def heaviest_first(weights, parts):
    """A balancer of equal counts: deal out from the heaviest, there and back."""
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    shares = [[] for _ in range(parts)]
    for place, item in enumerate(order):
        lap, at = divmod(place, parts)
        shares[at if lap % 2 == 0 else parts - 1 - at].append(item)
    return shares


def test_balance_keeps_groups_on_one_rank_with_rows_adjacent():
    order = balanced_order([[9, 9], [1, 1], [8, 8], [2, 2]], 2, 4, heaviest_first, whole_groups=True)
    assert order.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]  # groups 0 and 1 weigh 20, groups 2 and 3 too
    order = balanced_order([[9, 9], [8, 8], [1, 1], [2, 2]], 2, 4, heaviest_first, whole_groups=True)
    assert order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_mini_batch_holds_the_same_rows_on_any_number_of_ranks(ranks):
    sizes = [[3, 5], [2, 9], [4, 4], [7, 1], [6, 6], [1, 2], [3, 3], [5, 5]]  # 8 prompts x 2
    order = balanced_order(sizes, ranks, 4, heaviest_first, whole_groups=False)
    assert sorted(order.tolist()) == list(range(16))
    first = np.concatenate([s[: 8 // ranks] for s in np.split(order, ranks)])
    assert sorted(first.tolist()) == list(range(8))


def test_without_a_balancer_ranks_take_rows_in_order():
    order = balanced_order([[1, 1], [1, 1], [1, 1], [1, 1]], 2, 2, None, whole_groups=False)
    assert order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_mini_batch_that_ranks_cannot_share_is_named():
    with pytest.raises(ValueError, match="ppo_mini_batch_size=1 gives a mini-batch of 3 samples, which 2 ranks"):
        balanced_order([[1, 1, 1], [1, 1, 1]], 2, 1, None, whole_groups=False)
    with pytest.raises(ValueError, match="=2 gives a mini-batch of 1 samples.* also for data.train_batch_size"):
        balanced_order([[1], [1], [1]], 2, 2, None, whole_groups=False)
