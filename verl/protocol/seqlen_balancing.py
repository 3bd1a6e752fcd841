"""Sharing sequences of different lengths out evenly: between ranks, and between micro-batches."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from tensordict import TensorDict

if TYPE_CHECKING:
    from verl.protocol import DataProto


def calculate_workload(seqlen_list: torch.Tensor) -> torch.Tensor:
    """Cost of each sequence, lengths [N] -> [N]: a linear part (matrices) and a square part (attention)."""
    lengths = torch.as_tensor(seqlen_list).to(torch.int64)
    return 6 * 4096 * lengths + lengths**2  # the weight of a 7B model, whose hidden size is 4096


def karmarkar_karp(seqlen_list: list[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Largest differencing (Karmarkar, Karp 1982): indices in `k_partitions` sets of nearly equal sums.

    With `equal_size` every set has len/k entries. The heap has partial solutions, the one with the largest spread
    (largest less smallest sum) first: (negative spread, number that breaks ties, k sets as (sum, indices), largest sum
    first). Merging two of them joins the largest set of one with the smallest of the other.
    """
    _largest_set(len(seqlen_list), k_partitions, equal_size)  # for its error
    order = sorted((length, i) for i, length in enumerate(seqlen_list))
    seeds = k_partitions if equal_size else 1  # sequences that a partial solution starts with
    heap = []
    for number, start in enumerate(range(0, len(order), seeds)):
        sets = [(length, [i]) for length, i in reversed(order[start : start + seeds])]
        sets += [(0, [])] * (k_partitions - len(sets))
        heap.append((sets[-1][0] - sets[0][0], number, sets))
    heapq.heapify(heap)
    for number in range(len(heap), 2 * len(heap) - 1):
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = [(x + y, p + q) for (x, p), (y, q) in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda s: s[0], reverse=True)
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    return [indices for _, indices in heap[0][2]] if heap else [[] for _ in range(k_partitions)]


def greedy_partition(seqlen_list: list[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Longest first, each to the set with the least sum that still has room."""
    room = _largest_set(len(seqlen_list), k_partitions, equal_size)
    sets: list[list[int]] = [[] for _ in range(k_partitions)]
    heap = [(0, k) for k in range(k_partitions)]
    for i in sorted(range(len(seqlen_list)), key=lambda i: -seqlen_list[i]):
        total, k = heapq.heappop(heap)
        sets[k].append(i)
        if len(sets[k]) < room:
            heapq.heappush(heap, (total + seqlen_list[i], k))
    return sets


def _largest_set(count: int, k_partitions: int, equal_size: bool) -> int:
    """Number of sequences that fit into one set; ValueError where sets of equal size are impossible."""
    if equal_size and count % k_partitions:
        raise ValueError(f"{count} sequences cannot be shared out in {k_partitions} sets of equal size")
    return count // k_partitions if equal_size else count


def get_seqlen_balanced_partitions(seqlen_list: list[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """`k_partitions` non-empty sets of indices with nearly equal sums; each set in ascending order."""
    if k_partitions < 1 or len(seqlen_list) < k_partitions:
        raise ValueError(f"{len(seqlen_list)} sequences cannot fill {k_partitions} sets with at least one each")
    sets = karmarkar_karp(seqlen_list, k_partitions, equal_size)
    if not all(sets):  # differencing may leave a set empty when lengths are very uneven
        # A length of 0 would leave its set the least one, which then gets all that follow.
        sets = greedy_partition([max(1, n) for n in seqlen_list], k_partitions, equal_size)
    return [sorted(s) for s in sets]


def log_seqlen_unbalance(seqlen_list: list[int], partitions: list[list[int]], prefix: str) -> dict[str, float]:
    """Metrics of sharing out sequences of these lengths: tokens of a share. It logs nothing.

    min, max, minmax_diff: if the sequences were cut into consecutive shares; balanced_min, balanced_max: with
    `partitions`; mean: of either.
    """
    k, count = len(partitions), len(seqlen_list)
    before = [sum(seqlen_list[count * i // k : count * (i + 1) // k]) for i in range(k)]
    after = _sums(seqlen_list, partitions)
    return {
        f"{prefix}/min": min(before), f"{prefix}/max": max(before), f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after), f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(seqlen_list) / k,
    }


def ceildiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(a // -b)


def roundup_divisible(a: int, b: int) -> int:
    """The least multiple of b that is not below a."""
    return ceildiv(a, b) * b


def rearrange_micro_batches(
    batch: TensorDict, max_token_len: int, dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None, same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None, use_dynamic_bsz_balance: bool = True,
) -> tuple[list[TensorDict], list[list[int]]]:
    """Cut a batch into micro-batches of at most `max_token_len` real tokens each, of about equal cost.

    Args:
        batch: with attention_mask [B, T] (of [B, k, T], the first of the k counts), 1 for a real token.
        dp_group: the ranks that have to agree; None is the whole world, if torch.distributed is initialized.
        num_batches_divided_by: the number of micro-batches is rounded up to a multiple of it.
        same_micro_num_in_dp: all ranks take the number of the rank that needs most.
        min_num_micro_batch: the least number of micro-batches.
        use_dynamic_bsz_balance: the most expensive micro-batch comes first, so that a lack of memory shows at once.

    Returns the micro-batches, and the row numbers of each. Raises ValueError if a sequence exceeds `max_token_len`, or
    if there are fewer rows than micro-batches.
    """
    mask = batch["attention_mask"]
    lengths = mask.reshape(mask.shape[0], -1, mask.shape[-1])[:, 0].sum(-1)  # [B]
    rows, longest = len(lengths), int(lengths.max()) if len(lengths) else 0
    if longest > max_token_len:
        raise ValueError(f"max_token_len={max_token_len} is less than the longest sequence, {longest} tokens; raise it")
    work = calculate_workload(lengths).tolist()
    count = max(1, ceildiv(int(lengths.sum()), max_token_len), min_num_micro_batch or 1)
    parts = get_seqlen_balanced_partitions(work, min(count, rows), False) if rows else []
    while count < rows and max(_sums(lengths.tolist(), parts)) > max_token_len:
        count += 1
        parts = get_seqlen_balanced_partitions(work, count, False)
    if dist.is_initialized() and same_micro_num_in_dp:
        device = "cuda" if dist.get_backend(dp_group) == "nccl" else "cpu"
        shared = torch.tensor([count], device=device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=dp_group)
        count = int(shared.item())
    if num_batches_divided_by is not None:
        count = roundup_divisible(count, num_batches_divided_by)
    if count > rows:
        lower = "lower num_batches_divided_by or min_num_micro_batch"
        raise ValueError(f"{count} micro-batches are requested, but this rank has {rows} rows; {lower}")
    parts = get_seqlen_balanced_partitions(work, count, False)
    if use_dynamic_bsz_balance:
        parts.sort(key=lambda part: sum(work[i] for i in part), reverse=True)
    return [batch[torch.tensor(part, device=batch.device)] for part in parts], parts


def _sums(values: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(values[i] for i in part) for part in parts]


def prepare_dynamic_batch(
    data: DataProto, max_token_len: int, dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None, same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None, use_dynamic_bsz_balance: bool = True,
) -> tuple[list[DataProto], list[list[int]]]:
    """`rearrange_micro_batches` for a DataProto: micro-batches with their non-tensor columns, and their row numbers."""
    options = (dp_group, num_batches_divided_by, same_micro_num_in_dp, min_num_micro_batch, use_dynamic_bsz_balance)
    _, parts = rearrange_micro_batches(data.batch.select("attention_mask"), max_token_len, *options)
    return [data.select_idxs(part) for part in parts], parts


def get_reverse_idx(idx_map: list[int]) -> list[int]:
    """Inverse of a permutation: where each row went."""
    return sorted(range(len(idx_map)), key=idx_map.__getitem__)


def restore_dynamic_batch(data: torch.Tensor, batch_idx_list: list[list[int]]) -> torch.Tensor:
    """Rows that were joined micro-batch after micro-batch, [B, ...], back in the order they had before the cut.

    `batch_idx_list`: the row numbers that `rearrange_micro_batches` returned.
    """
    order = [i for part in batch_idx_list for i in part]
    if len(order) != data.shape[0]:
        raise ValueError(f"{data.shape[0]} rows cannot be restored by {len(order)} row numbers")
    return data[torch.tensor(order, device=data.device).argsort()]
