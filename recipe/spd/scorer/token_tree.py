"""One forward over texts that begin alike, in which each distinct beginning is read once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from recipe.spd.scorer.masks import refuse_other_attention

TREE_ROWS = 64  # texts of a tree
TREE_TOKENS = 4096  # distinct tokens of a tree, whose mask is their square


def alike(texts: Sequence[Sequence[int]], rows: int = TREE_ROWS) -> Iterator[list[int]]:
    """Numbers of the texts in lexicographic order, at most `rows` together that have at most TREE_TOKENS distinct
    tokens (or a single longer text).
    """
    chunk: list[int] = []
    tokens = 0
    for k in sorted(range(len(texts)), key=lambda k: list(texts[k])):
        new = len(texts[k]) - (_common_beginning(texts[k], texts[chunk[-1]]) if chunk else 0)
        if chunk and (len(chunk) == rows or tokens + new > TREE_TOKENS):
            yield chunk
            chunk, tokens, new = [], 0, len(texts[k])
        chunk.append(k)
        tokens += new
    if chunk:
        yield chunk


def _common_beginning(text: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common before they differ or one ends."""
    pairs = zip(text, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


class TokenTree:
    """The distinct tokens of some texts as one row, in which a token attends to its own text alone.

    `ids`, `positions`: int64 [N], a token after the one before it in its text. `paths[k]`: int64 [len(texts[k])], where
    the tokens of text k are in that row.
    """

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        number: dict[tuple[int, int], int] = {}  # (number of the token before, id) -> number
        self.parents: list[int] = []  # number of the token before, -1 at the start of a text
        self.paths = []
        positions = []
        for text in texts:
            path, before = [], -1
            for position, token in enumerate(text):
                if (before, token) not in number:
                    number[before, token] = len(number)
                    self.parents.append(before)
                    positions.append(position)
                before = number[before, token]
                path.append(before)
            self.paths.append(torch.tensor(path))
        self.ids = torch.tensor([token for _, token in number])
        self.positions = torch.tensor(positions)

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """The additive attention mask [1, 1, N, N]: 0 where the row's token sees the column's, else the least number.
        """
        size = len(self.parents)
        sees = torch.eye(size, dtype=torch.bool)
        for token, parent in enumerate(self.parents):
            if parent >= 0:
                sees[token] |= sees[parent]
        return torch.zeros(size, size, dtype=dtype).masked_fill_(~sees, torch.finfo(dtype).min)[None, None]

    def outputs(self, model: nn.Module, at: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits [B, n, V] float32 of a causal model at the tokens `at` [B, n], and its hidden states [B, n, H] there:
        those before the first layer and after each.

        Raises ValueError for a model that would not attend to all of a text.
        """
        refuse_other_attention(model, int(self.positions.max()) + 1)
        device = model.device
        output = model(
            input_ids=self.ids[None].to(device), position_ids=self.positions[None].to(device), use_cache=False,
            attention_mask=self.mask(model.dtype).to(device), output_hidden_states=True, logits_to_keep=at.flatten(),
        )  # fmt: skip
        return output.logits[0].view(*at.shape, -1).float(), [states[0][at] for states in output.hidden_states]
