"""The tokens that top-k and top-p left to draw from, at each position of a response.

A sampled token's log-prob is that of the distribution over these tokens. The trained model's log-probs are comparable
only if they are renormalised over the same tokens.

A row of the column SAMPLING_MASK is an int32 array: the number of tokens of the response, then how many tokens were
kept at each of them (0: all), then their ids, position by position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl.protocol.serialization import object_array

SAMPLING_MASK = "sampling_mask"
REMOVED = -1e30  # a logit whose token has probability 0; minus infinity would make an entropy NaN


def mask_column(rows: Iterable[Sequence[np.ndarray]]) -> np.ndarray:
    """The column [B] of rows that list the kept ids of each token of their response."""
    packed = []
    for kept in rows:
        counts = [len(kept), *map(len, kept)]
        packed.append(np.concatenate([np.array(counts), *kept]).astype(np.int32))
    return object_array(packed)


def kept_ids(row: np.ndarray) -> list[np.ndarray]:
    """The kept ids of each token of one row's response."""
    tokens = int(row[0])
    return np.split(row[1 + tokens :], np.cumsum(row[1 : 1 + tokens])[:-1]) if tokens else []


def mask_tensor(column: np.ndarray, length: int) -> torch.Tensor:
    """The column [B] as a tensor int32 [B, length + M]: the counts of R = `length` positions, then ids, zeros behind.

    M is the largest number of ids of a row. Rows that are None, such as those of lost conversations, keep all tokens.
    """
    rows = [np.zeros(1, np.int32) if row is None else row for row in column]
    width = max((len(row) - 1 - row[0] for row in rows), default=0)
    tensor = torch.zeros(len(rows), length + width, dtype=torch.int32)
    for i, row in enumerate(rows):
        tokens, ids = int(row[0]), row[1 + row[0] :]
        tensor[i, :tokens] = torch.from_numpy(row[1 : 1 + tokens])
        tensor[i, length : length + len(ids)] = torch.from_numpy(ids)
    return tensor


@dataclass(frozen=True)
class KeptTokens:
    """Kept tokens of N positions: `counts` int64 [N], 0 where all are kept, and `ids` int64 [sum of counts]."""

    counts: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def at(cls, mask: torch.Tensor, length: int, positions: torch.Tensor) -> KeptTokens:
        """Those of `positions` [N] int64, numbers in the responses [B, R = length] read row by row.

        mask: what `mask_tensor` returns.
        """
        counts = mask[:, :length].long()  # [B, R]
        row = torch.arange(len(mask), device=mask.device)[:, None] * mask.shape[1]
        starts = (row + length + counts.cumsum(1) - counts).flatten()[positions]  # of the ids in the flat mask
        chosen = counts.flatten()[positions]
        before = (chosen.cumsum(0) - chosen).repeat_interleave(chosen)
        offsets = torch.arange(len(before), device=mask.device) - before
        return cls(chosen, mask.flatten()[starts.repeat_interleave(chosen) + offsets].long())

    def removed(self, vocabulary: int, start: int, end: int) -> torch.Tensor:
        """Whether each token was removed at positions start to end: bool [end - start, vocabulary]."""
        counts = self.counts[start:end]
        first = int(self.counts[:start].sum())
        ids = self.ids[first : first + int(counts.sum())]
        removed = (counts > 0)[:, None].expand(-1, vocabulary).clone()
        removed[torch.arange(len(counts), device=counts.device).repeat_interleave(counts), ids] = False
        return removed
