"""Further rounds of speculative decoding, scorer included, between the judged block and the target's completion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recipe.spd.data.blocks import Block, SPDInputData, cut_at_end
from recipe.spd.rollout.decoder import speculative_generate

Scores = Callable[[SPDInputData], torch.Tensor]  # blocks -> z [B, g]
Gather = Callable[[Any], list[Any]]  # an object of this rank -> those of every rank, in rank order
ROWS_AT_A_TIME = 256  # each has its key/value caches


@dataclass(frozen=True)
class FurtherRounds:
    """Draft, target and scorer decode `blocks` more blocks of `gamma` tokens; a mismatch is accepted where z > 0.

    The decision is greedy: only the first block's actions are sampled and trained. A sharded scorer is gathered by all
    ranks together, so every rank judges equally often, in as many forwards as the rank with the most rows needs.
    """

    target: Any
    draft: Any
    blocks: int
    gamma: int
    eos: frozenset[int]
    sep_token_id: int
    rows_per_forward: int
    gather: Gather

    def extend(
        self, contexts: Sequence[tuple[int, ...]], scores: Scores
    ) -> dict[tuple[int, ...], tuple[tuple[int, ...], bool]]:
        """Context -> the token ids that `blocks` more rounds add to it, and whether an end token (not among them) came.

        Every rank calls it, without contexts too.
        """
        distinct = list(dict.fromkeys(contexts))
        missing = self.blocks * max(self.gather(-(-len(distinct) // ROWS_AT_A_TIME)))  # calls of the scorer

        def judge(block: Block) -> torch.Tensor:
            nonlocal missing
            missing -= 1
            z = self._scores(block.context_ids, block.draft_ids.tolist(), block.target_ids.tolist(), scores)
            return (z > 0).to(block.draft_ids.device)

        result = speculative_generate(
            self.target, self.draft, distinct, judge, gamma=self.gamma, eos_token_id=sorted(self.eos),
            max_new_tokens=self.blocks * (self.gamma + 1), max_rounds=self.blocks, batch_size=ROWS_AT_A_TIME,
        )  # fmt: skip
        for _ in range(missing):  # rows here ended early; other ranks may still judge
            self._scores([], [], [], scores)
        added = zip(distinct, result.tokens, result.finished, strict=True)
        return {context: (tuple(tokens[:-1] if ended else tokens), ended) for context, tokens, ended in added}

    def _scores(self, contexts: list, drafts: list, targets: list, scores: Scores) -> torch.Tensor:
        """z [B, gamma] of this rank's B >= 0 blocks; -1 after a draft's end token."""
        size, sep = self.rows_per_forward, self.sep_token_id
        parts = [torch.empty(0, self.gamma)]
        for k in range(max(self.gather(-(-len(contexts) // size)))):
            mine = slice(k * size, (k + 1) * size)
            blocks = list(zip(contexts[mine], drafts[mine], targets[mine], strict=True))
            # A rank without blocks takes part in the other ranks' forward with a block of matches.
            filler = ([sep], [sep] * self.gamma, [sep] * (self.gamma + 1))
            rows = [(context, *cut_at_end(draft, target, self.eos)) for context, draft, target in blocks or [filler]]
            z = scores(SPDInputData.from_blocks(
                *zip(*rows, strict=True), sep_token_id=sep, pad_token_id=sep, device=self.target.device
            ))  # fmt: skip
            parts.append(torch.nn.functional.pad(z, (0, self.gamma - z.shape[1]), value=-1.0)[: len(blocks)])
        return torch.cat([part.to(parts[-1].device) for part in parts])
