"""The prefix tree of a batch: which rows begin with the tokens of another row, so that a forward computes them once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

SHORTEST_GAIN = 64  # tokens; attention kernels work on tiles of that many queries, so that a shorter node saves little

TREE_COLUMNS = ("input_ids", "attention_mask", "position_ids", "group_index")


class PrefixTree(NamedTuple):
    """The first `shared` tokens of each of B rows are those of row `parent`, an earlier row or the row itself.

    The nodes of the tree are the pieces into which shared tokens cut the rows.
    """

    parent: torch.Tensor  # int64 [B]
    shared: torch.Tensor  # int64 [B], 0 where the row itself is its parent


def prefix_tree(columns: Mapping[str, torch.Tensor], responses: int) -> PrefixTree:
    """The tree of rows [B, P+R] whose last R = `responses` columns are the responses, on the host.

    columns: TREE_COLUMNS, attention_mask 1 = token, group_index [B]. Only rows of one group, which are adjacent, share
    tokens: those with equal token and position ids from the first token on. A row shares them up to where the other
    row is cut already, or both prompts end; or all of them, if these are at least SHORTEST_GAIN tokens more. Raises
    ValueError if a group's rows are not adjacent.
    """
    ids, mask, positions, groups = (columns[name].cpu().numpy() for name in TREE_COLUMNS)
    (rows, width), attended = ids.shape, mask.astype(bool)
    lengths, prompts = attended.sum(1), attended[:, : width - responses].sum(1)
    # [B, longest + 1]: from the left a number for each token and position id, then -1 - row, which is in no other row
    tokens = np.repeat(-1 - np.arange(rows)[:, None], lengths.max(initial=0) + 1, 1)
    tokens[np.arange(tokens.shape[1]) < lengths[:, None]] = (ids + (positions.astype(np.int64) << 32))[attended]
    parent, shared = np.arange(rows), np.zeros(rows, dtype=np.int64)
    cuts: list[set[int]] = [{0} for _ in range(rows)]  # where nodes end, in tokens of the row
    begins = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]])[:rows])
    if len(np.unique(groups)) != len(begins):
        raise ValueError(f"group_index {groups.tolist()} has a group whose rows are not adjacent.")
    for first, end in pairwise([*begins, rows]):
        for row in range(first + 1, end):
            agreeing = (tokens[first:row] != tokens[row]).argmax(1)  # [row - first], first tokens in common
            longest = int(agreeing.max())
            best = first + int(np.flatnonzero(agreeing == longest)[-1])
            # A cut that exists adds no node, and 0 shares nothing.
            places = cuts[best] | ({int(prompts[row])} if prompts[row] == prompts[best] else set())
            length = max(place for place in places if place <= longest)
            if longest - length >= SHORTEST_GAIN:
                length = longest
            if length:
                parent[row], shared[row] = best, length
                cuts[row] |= {cut for cut in cuts[best] if cut <= length}
                # All rows that begin with these tokens are cut after them.
                for other in (row, *(first + np.flatnonzero(agreeing >= length))):
                    cuts[other].add(length)
    return PrefixTree(torch.from_numpy(parent), torch.from_numpy(shared))
