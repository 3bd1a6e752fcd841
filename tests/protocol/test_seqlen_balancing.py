"""Balanced shares: properties, small optimal cases, and the way back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from verl import DataProto
from verl.utils import seqlen_balancing as s

FAST = settings(max_examples=40, deadline=None)


@FAST
@given(lengths=st.lists(st.integers(1, 500), min_size=4, max_size=24), k=st.integers(1, 4), equal=st.booleans())
def test_partitions_cover_every_index_once_and_are_never_empty(lengths, k, equal):
    if equal:
        lengths = lengths[: len(lengths) // k * k]
    parts = s.get_seqlen_balanced_partitions(lengths, k, equal_size=equal)
    assert sorted(i for p in parts for i in p) == list(range(len(lengths))) and len(parts) == k
    assert all(p and p == sorted(p) for p in parts)
    if equal:
        assert {len(p) for p in parts} == {len(lengths) // k}


@FAST
@given(lengths=st.lists(st.integers(1, 500), min_size=8, max_size=8))
def test_equal_shares_differ_by_no_more_than_the_longest_sequence(lengths):
    for share in (s.karmarkar_karp, s.greedy_partition):
        sums = [sum(lengths[i] for i in p) for p in share(lengths, 2, False)]
        assert max(sums) - min(sums) <= max(lengths)


def test_differencing_by_hand():
    # 8-7=1, 6-5=1, 1-1=0, 4: the classical example leaves a difference of 2 (16 and 14)
    sums = sorted(sum([8, 7, 6, 5, 4][i] for i in p) for p in s.karmarkar_karp([8, 7, 6, 5, 4], 2, False))
    assert sums == [14, 16]
    sums = [sum([1, 2, 3, 4][i] for i in p) for p in s.karmarkar_karp([1, 2, 3, 4], 2, True)]
    assert sums == [5, 5]
    with pytest.raises(ValueError, match="5 sequences cannot be shared out in 2 sets of equal size"):
        s.karmarkar_karp([1] * 5, 2, True)
    with pytest.raises(ValueError, match="1 sequences cannot fill 2 sets"):
        s.get_seqlen_balanced_partitions([1], 2, False)


def test_one_huge_sequence_leaves_no_set_empty():
    assert sorted(map(len, s.get_seqlen_balanced_partitions([1000, 1, 1, 1], 3, False))) == [1, 1, 2]


def batch(lengths):
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    return TensorDict({"attention_mask": mask, "row": torch.arange(len(lengths))}, batch_size=[len(lengths)])


@FAST
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20), limit=st.integers(50, 120))
def test_micro_batches_hold_the_limit_and_can_be_put_back(lengths, limit):
    micro, parts = s.rearrange_micro_batches(batch(lengths), max_token_len=limit)
    assert all(m["attention_mask"].sum() <= limit for m in micro)
    rows = torch.cat([m["row"] for m in micro])
    assert s.restore_dynamic_batch(rows, parts).tolist() == list(range(len(lengths)))


def test_the_number_of_micro_batches_follows_the_requests():
    b = batch([4, 4, 4, 4])
    assert len(s.rearrange_micro_batches(b, 8)[0]) == 2
    assert len(s.rearrange_micro_batches(b, 16, min_num_micro_batch=3)[0]) == 3
    assert len(s.rearrange_micro_batches(b, 16, num_batches_divided_by=2)[0]) == 2
    with pytest.raises(ValueError, match="max_token_len=3 is less than the longest sequence, 4"):
        s.rearrange_micro_batches(b, 3)
    with pytest.raises(ValueError, match="6 micro-batches .* 4 rows; lower num_batches_divided_by or min_num_m"):
        s.rearrange_micro_batches(b, 16, num_batches_divided_by=6)


def test_the_heaviest_micro_batch_comes_first():
    micro, _ = s.rearrange_micro_batches(batch([1, 2, 9, 1, 1]), 9)
    sums = [int(m["attention_mask"].sum()) for m in micro]
    assert sums == sorted(sums, reverse=True)


def test_dynamic_batches_of_a_dataproto_keep_their_columns():
    data = DataProto(batch([5, 1, 3]))
    data.non_tensor_batch["uid"] = data.batch["row"].numpy().astype(object)
    micro, parts = s.prepare_dynamic_batch(data, max_token_len=5)
    assert [m.non_tensor_batch["uid"].tolist() for m in micro] == parts


def test_imbalance_metrics_by_hand():
    got = s.log_seqlen_unbalance([4, 3, 2, 1], [[0, 3], [1, 2]], "global_seqlen")
    names = ("min", "max", "minmax_diff", "balanced_min", "balanced_max", "mean")
    assert got == dict(zip((f"global_seqlen/{n}" for n in names), (3, 7, 4, 5, 5, 5), strict=True))


def test_small_arithmetic():
    assert (s.ceildiv(5, 2), s.roundup_divisible(5, 4), s.get_reverse_idx([2, 0, 1])) == (3, 8, [1, 2, 0])
    assert s.calculate_workload(torch.tensor([2])).tolist() == [24576 * 2 + 4]
