"""Further rounds of speculative decoding, scorer included, between the judged block and the target's completion."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from recipe.spd.data.blocks import Block, SPDInputData, cut_at_end
from recipe.spd.rollout.decoder import speculative_generate

Scores = Callable[[SPDInputData], torch.Tensor]  # blocks -> z [B, g]
Gather = Callable[[Any], list[Any]]  # an object of this rank -> those of every rank, in rank order
ROWS_AT_A_TIME = 256  # contexts decoded together; each has its key/value caches


class Addition(NamedTuple):
    """What the rounds add to a context: token ids without the end token, and whether one came."""

    tokens: tuple[int, ...]
    ended: bool


@dataclass(frozen=True)
class FurtherRounds:
    """Draft, target and scorer decode `blocks` more blocks of `gamma` tokens; a mismatch is accepted where z > 0.

    The decision is greedy: only the first block's actions are sampled and trained. All ranks gather a sharded scorer
    together, so each must call it equally often: one that has fewer rows, or whose rows end earlier, calls it with
    blocks that fill up, until all have made as many calls as the rank with the most.

    Attributes:
        blocks: rounds to decode at most; each adds up to gamma + 1 tokens.
        eos: ids of end tokens.
        sep_token_id: separator of the scorer's input, and its padding.
        rows_per_forward: blocks that one forward of the scorer takes.
        gather: see Gather; called by all ranks together.
    """

    target: Any
    draft: Any
    blocks: int
    gamma: int
    eos: frozenset[int]
    sep_token_id: int
    rows_per_forward: int
    gather: Gather

    def extend(self, contexts: Sequence[tuple[int, ...]], scores: Scores) -> dict[tuple[int, ...], Addition]:
        """{context: what the rounds add to it}. All ranks call it together, a rank without contexts too."""
        distinct = list(dict.fromkeys(contexts))
        # Once per round and chunk of the rank with the most chunks.
        calls_left = self.blocks * max(self.gather(math.ceil(len(distinct) / ROWS_AT_A_TIME)))

        def judge(block: Block) -> torch.Tensor:
            nonlocal calls_left
            calls_left -= 1
            z = self._score_together(block.context_ids, block.draft_ids.tolist(), block.target_ids.tolist(), scores)
            return (z > 0).to(block.draft_ids.device)

        result = speculative_generate(
            self.target, self.draft, distinct, judge, gamma=self.gamma, eos_token_id=sorted(self.eos),
            max_new_tokens=self.blocks * (self.gamma + 1), max_rounds=self.blocks, batch_size=ROWS_AT_A_TIME,
        )  # fmt: skip
        for _ in range(calls_left):  # that other ranks may still make, after rows here ended early or were fewer
            self._score_together([], [], [], scores)
        added = zip(distinct, result.tokens, result.finished, strict=True)
        return {context: Addition(tuple(tokens[:-1] if ended else tokens), ended) for context, tokens, ended in added}

    def _score_together(self, contexts: list, drafts: list, targets: list, scores: Scores) -> torch.Tensor:
        """z [B, gamma] of this rank's B >= 0 blocks; -1 (reject) after a draft's end token.

        All ranks call it together and make the same number of forwards.
        """
        size, sep = self.rows_per_forward, self.sep_token_id
        filler = ([sep], [sep] * self.gamma, [sep] * (self.gamma + 1))  # a block of matches, whose z is dropped
        parts = [torch.empty(0, self.gamma)]
        for number in range(max(self.gather(math.ceil(len(contexts) / size)))):
            mine = slice(number * size, (number + 1) * size)
            blocks = list(zip(contexts[mine], drafts[mine], targets[mine], strict=True))
            rows = [(context, *cut_at_end(draft, target, self.eos)) for context, draft, target in blocks or [filler]]
            z = scores(SPDInputData.from_blocks(
                *zip(*rows, strict=True), sep_token_id=sep, pad_token_id=sep, device=self.target.device
            ))  # fmt: skip
            parts.append(torch.nn.functional.pad(z, (0, self.gamma - z.shape[1]), value=-1.0)[: len(blocks)])
        return torch.cat([part.to(parts[-1].device) for part in parts])
