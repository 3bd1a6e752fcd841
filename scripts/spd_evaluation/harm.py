"""Shares of harmless and harmful mismatches that each rule accepts, on one fixed set of labelled blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl.utils.jsonl import read_objects

if TYPE_CHECKING:
    import torch
    from torch import nn

    from recipe.spd.data.blocks import Block, Judge

COLUMNS = ("block_id", "position", "context_ids", "draft_ids", "harmful")


@dataclass(frozen=True)
class LabelledBlock:
    """One drafted block; `harmful[i]`: the right answer becomes wrong if the mismatches up to i are accepted.

    What follows a harmful mismatch counts nowhere: the answer is broken there already, whatever the next mismatch does.
    """

    context_ids: list[int]
    draft_ids: list[int]
    harmful: dict[int, bool]

    def reachable(self) -> dict[int, bool]:
        """The labels up to and including the first harmful one."""
        first = min((position for position, harmful in self.harmful.items() if harmful), default=len(self.draft_ids))
        return {position: harmful for position, harmful in self.harmful.items() if position <= first}


def harm_shares(
    judges: Sequence[Judge], target: nn.Module, draft: nn.Module, blocks: Sequence[LabelledBlock]
) -> list[tuple[float | None, float | None]]:
    """For each judge: (share of the harmless, share of the harmful) mismatches it accepts; None where there are none.

    Each reachable mismatch is judged as if everything before it in its block had been accepted.
    """
    shares = []
    for judged in labelled_scores({str(k): judge for k, judge in enumerate(judges)}, target, draft, blocks).values():
        kinds: tuple[list[float], list[float]] = ([], [])
        for accepted, harmful in (pair for block in judged for pair in block):
            kinds[harmful].append(accepted)
        shares.append(tuple(sum(accepted) / len(accepted) if accepted else None for accepted in kinds))
    return shares


def labelled_scores(
    scores: Mapping[str, Callable[[Block], torch.Tensor]], target: nn.Module, draft: nn.Module,
    blocks: Sequence[LabelledBlock],
) -> dict[str, list[list[tuple[float, bool]]]]:  # fmt: skip
    """By name of a score (Block -> z [B, g]), for each block (z, harmful) of its reachable mismatches, in order."""
    from recipe.spd.rollout.decoder import replay_blocks

    labelled: dict[str, list[list[tuple[float, bool]]]] = {name: [[] for _ in blocks] for name in scores}
    contexts, drafts = [block.context_ids for block in blocks], [block.draft_ids for block in blocks]
    for view in replay_blocks(target, draft, contexts, drafts):
        for name, score in scores.items():
            z = score(view).tolist()
            for k, place in enumerate(view.rows.tolist()):
                reachable = sorted(blocks[place].reachable().items())
                labelled[name][place] = [(z[k][at], harmful) for at, harmful in reachable]
    return labelled


def read_labels(path: Path) -> list[LabelledBlock]:
    """Blocks of a jsonl file with one line a labelled mismatch: block_id, position, context_ids, draft_ids, harmful."""
    blocks: dict[str, LabelledBlock] = {}
    for number, record in read_objects(path):
        missing = [name for name in COLUMNS if name not in record]
        if missing:
            raise ValueError(f"{path}, line {number}: lacks {missing}; it has {sorted(record)}")
        fresh = LabelledBlock(record["context_ids"], record["draft_ids"], {})
        block = blocks.setdefault(record["block_id"], fresh)
        if (block.context_ids, block.draft_ids) != (fresh.context_ids, fresh.draft_ids):
            raise ValueError(f"{path}, line {number}: block {record['block_id']!r} has another context or draft above")
        if not 0 <= record["position"] < len(block.draft_ids):
            raise ValueError(
                f"{path}, line {number}: position {record['position']} lies outside of the "
                f"{len(block.draft_ids)} draft tokens"
            )
        block.harmful[record["position"]] = bool(record["harmful"])
    return list(blocks.values())
