"""The prefix tree of a batch: which rows begin with the tokens of another row, so that a forward computes them once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

SHORTEST = 64  # tokens; attention kernels work on tiles of that many queries, so that a shorter node saves little

TREE_COLUMNS = ("input_ids", "attention_mask", "position_ids", "group_index")


class PrefixTree(NamedTuple):
    """The first `shared` tokens of each of B rows are those of row `parent`, an earlier row or the row itself.

    The nodes of the tree are the pieces into which shared tokens cut the rows.
    """

    parent: torch.Tensor  # int64 [B]
    shared: torch.Tensor  # int64 [B], 0 where the row itself is its parent


def prefix_tree(columns: Mapping[str, torch.Tensor], responses: int) -> PrefixTree:
    """The tree of rows [B, P+R] whose last R = `responses` columns are the responses, on the host.

    columns: TREE_COLUMNS, on the host; only rows of equal group_index [B], which are adjacent, share tokens: those with
    equal token and position ids from the first token on. A node has at least SHORTEST tokens, except for a prompt
    that is equal in two rows: it is shared whatever its length. Raises ValueError if a group's rows are not adjacent.
    """
    ids, mask, positions, groups = (columns[name].cpu().numpy() for name in TREE_COLUMNS)
    attended, (rows, width) = mask.astype(bool), ids.shape
    lengths, prompts = attended.sum(1), attended[:, : width - responses].sum(1)
    # [B, longest + 1], tokens from the left; the numbers after them differ from all others, so that every row ends
    tokens = np.repeat(-1 - np.arange(rows)[:, None], lengths.max(initial=0) + 1, 1)
    tokens[np.arange(tokens.shape[1]) < lengths[:, None]] = (ids + (positions.astype(np.int64) << 32))[attended]
    parent, shared = np.arange(rows), np.zeros(rows, dtype=np.int64)
    cuts: list[set[int]] = [{0} for _ in range(rows)]  # where nodes end, in tokens of the row
    begins = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]])) if rows else np.zeros(0, int)
    if len(np.unique(groups)) != len(begins):
        raise ValueError(f"group_index {groups.tolist()} has a group whose rows are not adjacent.")
    for first, end in zip(begins, [*begins[1:], rows], strict=True):
        for row in range(first + 1, end):
            common = (tokens[first:row] != tokens[row]).argmax(1)  # with each row before it
            longest = int(common.max())
            nearest = first + int(np.flatnonzero(common == longest)[-1])
            ends = cuts[nearest] | ({int(prompts[row])} if prompts[row] == prompts[nearest] else set())
            kept = max(cut for cut in ends if cut <= longest)
            kept = longest if longest - kept >= SHORTEST else kept
            if kept:
                parent[row], shared[row] = nearest, kept
                cuts[row] |= {cut for cut in cuts[nearest] if cut <= kept}
                for other in (row, *(first + np.flatnonzero(common >= kept))):
                    cuts[other].add(kept)
    return PrefixTree(torch.from_numpy(parent), torch.from_numpy(shared))
