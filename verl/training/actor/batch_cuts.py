"""Cuts a rank's batch into mini-batches and micro-batches, equally many on every rank."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from verl.protocol import DataProto
from verl.protocol.seqlen_balancing import prepare_dynamic_batch
from verl.training.policy.prefix_tree import prefix_tree

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
    data: DataProto, *, rows: int | None, tokens: int | None, whole_groups: bool, reads_answers: bool = True
) -> list[tuple[list[int], DataProto]]:
    """(row numbers, micro-batch) pieces of at most `rows` rows, or `tokens` attended tokens where that is given.

    With `whole_groups`, a group that fits stays together, and so do its rows with the same prompt even if they do not
    fit; tokens that rows share are forwarded once, so that they count once. `reads_answers`: the forward runs over the
    answers; else all rows of a group have one input.
    """
    if tokens is None and rows is None:
        raise ValueError(
            "neither a micro-batch size (ppo_micro_batch_size_per_gpu, of log-probs log_prob_micro_batch_size_per_gpu, "
            "of a critic's values forward_micro_batch_size_per_gpu) nor use_dynamic_bsz=true (of log-probs "
            "log_prob_use_dynamic_bsz) is set for this role; set one of them."
        )
    if tokens is not None and not whole_groups:
        pieces, index = prepare_dynamic_batch(data, max_token_len=tokens)
        return list(zip(index, pieces, strict=True))
    limit = rows if tokens is None else tokens
    if whole_groups:
        units, weights = _pieces_of_groups(data.batch, limit, tokens is not None, reads_answers)
    else:
        units, weights = [[i] for i in range(len(data))], [1] * len(data)
    parts = equal_count_across_ranks(units, join_units(units, weights, limit), "micro-batches")
    return [(part, data.select_idxs(np.asarray(part))) for part in parts]


def _pieces_of_groups(
    batch: TensorDict, limit: int, by_tokens: bool, reads_answers: bool
) -> tuple[list[list[int]], list[int]]:
    """The row numbers and the weight of each group; one above `limit` is cut between rows of different prompts.

    A row weighs its tokens, without those that it shares with an earlier row of its piece; or 1, unless `by_tokens`.
    """
    mask, groups = batch["attention_mask"], groups_of(batch["group_index"])
    lengths = mask.sum(-1).tolist()
    if not reads_answers:
        return groups, [lengths[group[0]] if by_tokens else len(group) for group in groups]
    responses = batch["responses"].shape[1]
    if by_tokens:
        parent, shared = (column.tolist() for column in prefix_tree(batch, responses))
    prompts = torch.cat([batch["input_ids"][:, :-responses], mask[:, :-responses]], 1)
    same_prompt_as_before = [False, *(prompts[1:] == prompts[:-1]).all(1).tolist()]

    def weight(rows: list[int], first: int) -> int:
        """Of rows in a piece whose first row is `first`."""
        if not by_tokens:
            return len(rows)
        return sum(lengths[row] - (shared[row] if parent[row] >= first else 0) for row in rows)

    pieces: list[list[int]] = []
    weights: list[int] = []
    for group in groups:
        blocks = [group]
        if weight(group, group[0]) > limit:
            blocks = []  # adjacent rows with the same prompt
            for row in group:
                if not blocks or not same_prompt_as_before[row]:
                    blocks.append([])
                blocks[-1].append(row)
        for block in blocks:
            if block[0] == group[0] or weights[-1] + weight(block, pieces[-1][0]) > limit:
                pieces.append([])
                weights.append(0)
            pieces[-1] += block
            weights[-1] += weight(block, pieces[-1][0])
    return pieces, weights


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
