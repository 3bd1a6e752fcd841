"""Cuts a rank's batch into mini-batches and micro-batches, equally many on every rank."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist

from verl.protocol import DataProto
from verl.protocol.seqlen_balancing import prepare_dynamic_batch

#: meta_info of a batch whose samples are that many adjacent rows each (1 without it)
ROWS_PER_SAMPLE = "rows_per_sample"


def join_units(units: list[list[int]], weights: list[int], budget: int) -> list[list[int]]:
    """Whole units, in order, joined while their weights fit into `budget`; a heavier unit stands alone."""
    parts: list[list[int]] = []
    used = budget + 1
    for unit, weight in zip(units, weights, strict=True):
        if used + weight > budget:
            parts.append([])
            used = 0
        parts[-1] += unit
        used += weight
    return parts


def groups_of(group_index: torch.Tensor) -> list[list[int]]:
    """Row numbers of each run of equal labels in group_index [B], in order."""
    _, counts = torch.unique_consecutive(group_index, return_counts=True)
    ends = counts.cumsum(0).tolist()
    return [list(range(end - count, end)) for end, count in zip(ends, counts.tolist(), strict=True)]


def mini_batches(
    data: DataProto, size: int, *, whole_groups: bool, epochs: int, shuffle: bool, seed: int
) -> Iterator[DataProto]:
    """The rows of `size` samples each (the last may be shorter), `epochs` times over; along groups where asked."""
    size *= data.meta_info.get(ROWS_PER_SAMPLE, 1)
    units = groups_of(data.batch["group_index"]) if whole_groups else [[i] for i in range(len(data))]
    generator = np.random.default_rng(seed)
    for _ in range(epochs):
        shuffled = [units[i] for i in generator.permutation(len(units))] if shuffle else units
        parts = join_units(shuffled, [len(u) for u in shuffled], size)
        for rows in equal_count_across_ranks(shuffled, parts, "mini-batches"):
            yield data.select_idxs(np.asarray(rows))


def micro_batches(
    data: DataProto, *, rows: int | None, tokens: int | None, whole_groups: bool, shared: bool = False,
    reads_answers: bool = True,
) -> list[tuple[list[int], DataProto]]:
    """(row numbers, micro-batch) pieces of at most `rows` rows, or `tokens` attended tokens where that is given.

    `shared`: a group's prompt is forwarded once, so that it counts once; `reads_answers`: the answers are, too.
    """
    if tokens is None and rows is None:
        raise ValueError(
            "actor.ppo_micro_batch_size_per_gpu is not set and actor.use_dynamic_bsz is false; set one of them."
        )
    if tokens is not None and not whole_groups:
        pieces, index = prepare_dynamic_batch(data, max_token_len=tokens)
        return list(zip(index, pieces, strict=True))
    units = groups_of(data.batch["group_index"]) if whole_groups else [[i] for i in range(len(data))]
    if tokens is None:
        parts = join_units(units, [len(u) for u in units], rows)
    else:
        mask = data.batch["attention_mask"]
        answers = data.batch["responses"].shape[1] if reads_answers else 0
        prompt, answer = mask[:, : mask.shape[1] - answers].sum(-1), mask[:, mask.shape[1] - answers :].sum(-1)
        weights = [int(prompt[u[:1] if shared else u].sum() + answer[u].sum()) for u in units]
        parts = join_units(units, weights, tokens)
    parts = equal_count_across_ranks(units, parts, "micro-batches")
    return [(part, data.select_idxs(np.asarray(part))) for part in parts]


def equal_count_across_ranks(units: list[list[int]], parts: list[list[int]], what: str) -> list[list[int]]:
    """Cut `units` again if another rank has more parts: the forward and backward passes of a part are collective calls.

    `what` names the parts in messages. Raises ValueError if this needs more parts than some rank has units.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return parts
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    bounds = torch.tensor([len(parts), -len(units)], device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    count, fewest = int(bounds[0]), -int(bounds[1])
    if count == len(parts):
        return parts
    if count > fewest:
        raise ValueError(
            f"one rank needs {count} {what}, another has only {fewest} groups to cut: the batch is shared out unevenly."
        )
    bounds = [len(units) * i // count for i in range(count + 1)]
    return [[row for unit in units[a:b] for row in unit] for a, b in zip(bounds, bounds[1:], strict=False)]


def restore_order(pieces: list[torch.Tensor], index: list[list[int]]) -> torch.Tensor:
    """Rows back to where they came from: pieces [b_i, ...] and their row numbers -> [B, ...]."""
    order = torch.tensor([row for part in index for row in part])
    joined = torch.cat(pieces)
    return torch.empty_like(joined).index_copy_(0, order.to(joined.device), joined)
