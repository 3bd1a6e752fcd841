"""Further rounds of speculative decoding, scorer included, between the judged block and the target's completion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recipe.spd.dataset import SPDInputData, cut_at_end
from recipe.spd.decoder import Block, speculative_generate

Scores = Callable[[SPDInputData], torch.Tensor]  # blocks -> z [B, g]
Gather = Callable[[Any], list[Any]]  # an object of this rank -> those of every rank, in rank order
ROWS_AT_A_TIME = 256  # each has its key/value caches


@dataclass(frozen=True)
class Continuation:
    """The tokens that further rounds add to a context."""

    tokens: tuple[int, ...]  # without the end token
    ended: bool  # an end token was reached


@dataclass(frozen=True)
class FurtherRounds:
    """Draft, target and scorer decode `blocks` more blocks of `gamma` tokens; a mismatch is accepted where z > 0.

    The decision is greedy: only the first block's actions are sampled and trained. A sharded scorer is gathered by all
    ranks together, so each rank judges `blocks` times in as many forwards as the rank with the most rows needs.
    """

    target: Any
    draft: Any
    blocks: int
    gamma: int
    eos: frozenset[int]
    sep_token_id: int
    rows_per_forward: int
    gather: Gather

    def extend(self, contexts: Sequence[tuple[int, ...]], scores: Scores) -> dict[tuple[int, ...], Continuation]:
        """Context (token ids) -> what `blocks` more rounds add to it. Every rank calls it, without contexts too."""
        distinct, size = list(dict.fromkeys(contexts)), ROWS_AT_A_TIME
        added: dict[tuple[int, ...], Continuation] = {}
        for chunk in range(max(self.gather(-(-len(distinct) // size)))):
            added |= self._extend(distinct[chunk * size : (chunk + 1) * size], scores)
        return added

    def _extend(self, contexts: list[tuple[int, ...]], scores: Scores) -> dict[tuple[int, ...], Continuation]:
        """`extend` for at most ROWS_AT_A_TIME contexts."""
        judged = 0

        def judge(block: Block) -> torch.Tensor:
            nonlocal judged
            judged += 1
            z = self._scores(block.context_ids, block.draft_ids.tolist(), block.target_ids.tolist(), scores)
            return (z > 0).to(block.draft_ids.device)

        added: dict[tuple[int, ...], Continuation] = {}
        if contexts:
            result = speculative_generate(
                self.target, self.draft, contexts, judge, gamma=self.gamma, eos_token_id=sorted(self.eos),
                max_new_tokens=self.blocks * (self.gamma + 1), max_rounds=self.blocks, batch_size=len(contexts),
            )  # fmt: skip
            for context, tokens, ended in zip(contexts, result.tokens, result.finished, strict=True):
                added[context] = Continuation(tuple(tokens[:-1] if ended else tokens), ended)
        for _ in range(self.blocks - judged):  # rows here ended early; other ranks may still judge
            self._scores([], [], [], scores)
        return added

    def _scores(self, contexts: list, drafts: list, targets: list, scores: Scores) -> torch.Tensor:
        """z [B, gamma] of this rank's B >= 0 blocks."""
        size = self.rows_per_forward
        parts = []
        for k in range(max(self.gather(-(-len(contexts) // size)))):
            mine = slice(k * size, (k + 1) * size)
            if contexts[mine]:
                parts.append(self._forward(contexts[mine], drafts[mine], targets[mine], scores))
            else:  # a block of matches takes part in the other ranks' forward
                filler = ([[self.sep_token_id] * count] for count in (1, self.gamma, self.gamma + 1))
                self._forward(*filler, scores)
        return torch.cat(parts) if parts else torch.empty(0, self.gamma)

    def _forward(self, contexts: list, drafts: list, targets: list, scores: Scores) -> torch.Tensor:
        """z [B, gamma] of one forward; -1 after a draft's end token."""
        pairs = (cut_at_end(draft, target, self.eos) for draft, target in zip(drafts, targets, strict=True))
        drafts, targets = zip(*pairs, strict=True)
        tokens = {"sep_token_id": self.sep_token_id, "pad_token_id": self.sep_token_id}
        z = scores(SPDInputData.from_blocks(contexts, drafts, targets, **tokens, device=self.target.device))
        return torch.nn.functional.pad(z, (0, self.gamma - z.shape[1]), value=-1.0)
