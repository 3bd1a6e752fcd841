"""Counterfactual labels of single mismatches, as AutoJudge mines important tokens.

Mismatches are accepted one by one, the target completes the answer after each, and the first one that turns a right
answer wrong is harmful. These are the completions that the GRPO rollout asks for when it accepts so many mismatches, so
both draw on one store, and a budget compares them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from recipe.spd.rollout.client import Completer
from recipe.spd.rollout.samples import grade_blocks, judged_block

BLOCKS_AT_A_TIME = 512  # labelled together


def label_blocks(
    infos: Sequence[dict[str, Any]], completer: Completer, tokenizer: Any, eos: Collection[int], max_tokens: int,
    budget: int | None = None,
) -> tuple[dict[int, list[bool]], int]:  # fmt: skip
    """Index in `infos` -> harmless or not of its mismatches, up to and including the first harmful one; and the number
    of distinct completions used.

    Blocks whose baseline is wrong or cut at the limit have no labels, and those with a lost completion lose the rest.
    Blocks are labelled in order until the `budget` of completions is spent.
    """
    labels: dict[int, list[bool]] = {}
    used: set = set()
    for first in range(0, len(infos), BLOCKS_AT_A_TIME):
        open_blocks = range(first, min(first + BLOCKS_AT_A_TIME, len(infos)))
        while open_blocks:
            judged = {}
            for i in open_blocks:
                pairs = list(zip(infos[i]["draft_ids"], infos[i]["target_ids"], strict=False))
                places = [at for at, (drafted, chosen) in enumerate(pairs) if drafted != chosen]
                known = len(labels.get(i, ()))
                if known < len(places):  # accept all that is known to be harmless and one more
                    actions = tuple(int(at <= places[known]) for at in range(len(pairs)))
                    judged[i] = judged_block(infos[i], actions, eos, 1)
            asked = {i: block.requests(max_tokens) for i, block in judged.items()}
            for i, wanted in asked.items():
                if budget is not None and len(used) + len(set(wanted) - used) > budget:
                    judged = {k: block for k, block in judged.items() if k < i}
                    budget = len(used)  # spent: this is the last pass
                    break
                used.update(wanted)
            requests = [request for i in judged for request in asked[i]]
            grade_blocks(list(judged.values()), completer.complete(requests)[0], tokenizer, max_tokens)
            for i, block in judged.items():
                if block.baseline_correct and block.correct is not None:
                    labels.setdefault(i, []).append(block.correct)
            if budget is not None and len(used) == budget:
                return labels, len(used)
            open_blocks = [i for i, b in judged.items() if b.baseline_correct and b.correct]
    return labels, len(used)
