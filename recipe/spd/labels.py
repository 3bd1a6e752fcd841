"""Counterfactual labels: which mismatches of a block keep the answer right when they are accepted."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from recipe.spd.data.blocks import mismatches
from recipe.spd.rollout.client import Completer, Request
from recipe.spd.rollout.samples import grade_blocks, judged_block

BLOCKS_AT_A_TIME = 512  # labelled together

# Number of a block -> the labels of its first mismatches: 1 harmless, 0 harmful, or a share between.
Labels = Mapping[int, Sequence[float]]


class Labelling(NamedTuple):
    """Labels, and what they cost."""

    labels: Labels
    tried: int  # blocks
    completions: int  # distinct ones


def label_blocks(
    infos: Sequence[dict[str, Any]], completer: Completer, tokenizer: Any, eos: Collection[int], max_tokens: int,
    budget: int | None = None,
) -> Labelling:  # fmt: skip
    """Label the mismatches of each block (its extra_info), up to and including the first harmful one.

    Blocks whose baseline is wrong or cut at the limit have no labels, and those with a lost completion lose the rest.
    Blocks are labelled in order until the `budget` of completions is spent.
    """
    labels: dict[int, list[bool]] = {}
    used: set[Request] = set()
    tried = 0
    for first in range(0, len(infos), BLOCKS_AT_A_TIME):
        open_blocks = list(range(first, min(first + BLOCKS_AT_A_TIME, len(infos))))  # no harmful mismatch so far
        known = 0  # labels that each of them has
        while open_blocks:
            judged = {}
            for i in open_blocks:
                draft = infos[i]["draft_ids"]
                places = mismatches(draft, infos[i]["target_ids"])
                if known == len(places):
                    continue
                actions = tuple(int(at <= places[known]) for at in range(len(draft)))  # accept one mismatch more
                block = judged_block(infos[i], actions, eos, rounds=1)
                new = set(block.requests(max_tokens)) - used
                if budget is not None and len(used) + len(new) > budget:
                    budget = len(used)  # spent: this is the last pass
                    break
                used |= new
                judged[i] = block
                tried = max(tried, i + 1)
            requests = [request for block in judged.values() for request in block.requests(max_tokens)]
            known += 1
            completions, _ = completer.complete(requests, f"Labels of mismatch {known}")
            grade_blocks(list(judged.values()), completions, tokenizer, max_tokens)
            for i, block in judged.items():
                if block.baseline_correct and block.correct is not None:
                    labels.setdefault(i, []).append(block.correct)
            if len(used) == budget:
                return Labelling(labels, tried, len(used))
            open_blocks = [i for i, block in judged.items() if block.baseline_correct and block.correct]
    return Labelling(labels, tried, len(used))


def given_labels(infos: Sequence[dict[str, Any]], budget: int | None) -> Labels:
    """The labels that the data has of the blocks, `budget` labels at most; empty without."""
    labels, count = {}, 0
    for i, info in enumerate(infos):
        if given := info.get("labels"):
            count += len(given)
            if budget is not None and count > budget:
                break
            labels[i] = given
    return labels
