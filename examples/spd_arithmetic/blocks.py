"""Drafted blocks from real speculative decoding, and counterfactual labels of what each mismatch does."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

from examples.spd_arithmetic.pair import EXACT, Decoding, Pair, Recorded
from examples.spd_arithmetic.questions import Question
from examples.spd_arithmetic.workers import Progress
from recipe.spd.data.blocks import mismatches


@dataclass(frozen=True)
class DraftedBlock:
    """One round of speculative decoding: target_ids has one token more than draft_ids, the bonus token."""

    block_id: str
    question_id: str
    context_ids: list[int]
    draft_ids: list[int]
    target_ids: list[int]
    is_correct_baseline: bool  # the target's own completion from this context is right
    baseline_length: int  # tokens of that completion, without its end token
    question_len: int  # tokens of the context before the answer begins


@dataclass(frozen=True)
class HarmLabel:
    """What accepting one mismatch, and everything before it in the block, does to an answer that was right."""

    question_id: str
    block_id: str
    position: int
    context_ids: list[int]
    draft_ids: list[int]
    target_ids: list[int]
    harmful: bool
    already_broken: bool  # an earlier mismatch of the block was harmful: a judge that rejects it never gets here


@dataclass(frozen=True)
class OwnPath:
    """Exact-match decoding of some questions: its blocks, and which of the target's own answers are right."""

    blocks: list[DraftedBlock]
    correct: dict[str, bool]
    accepted_per_forward: float
    tokens_per_forward: float


def own_paths(
    pair: Pair, asked: Sequence[tuple[Sequence[Question], int, int]], seed: int, progress: Progress
) -> list[OwnPath]:
    """For each (questions, count, offsets): decode by exact match, which is the target's own greedy text, and sample
    `count` of the blocks met. `offsets`: see drawn_offsets.

    All questions are decoded together. No question may be asked twice.
    """
    offsets = [offset for questions, _, largest in asked for offset in drawn_offsets(len(questions), largest, seed)]
    whole = pair.speculative(list(chain(*(questions for questions, *_ in asked))), EXACT, progress, offsets)
    met, first = [], 0
    for questions, count, _ in asked:
        met.append(whole.part(questions, first))
        first += len(questions)
        if count and not met[-1].blocks:
            raise ValueError(f"draft and target agree on every token of {len(questions)} questions, so there is "
                             "nothing to judge; use another draft")
    sampled = [sample(part.blocks, count, seed) for part, (_, count, _) in zip(met, asked, strict=True)]
    completed = iter(pair.complete_blocks(list(chain(*sampled)), lambda *at: progress(*at, "(blocks)")))
    return [_own_path(pair, questions, part, list(islice(completed, len(drawn))))
            for (questions, *_), part, drawn in zip(asked, met, sampled, strict=True)]


def _own_path(pair: Pair, questions: Sequence[Question], decoding: Decoding, sampled: Sequence[Recorded]) -> OwnPath:
    correct, lengths = {}, {}
    for q, ids in zip(questions, decoding.tokens, strict=True):
        correct[q.question_id] = pair.is_right(ids, q)
        lengths[q.question_id] = len(q.prompt_ids) + pair.spoken(ids)
    blocks = [_block(q, c, d, t, correct[q.question_id], lengths[q.question_id] - len(c), "own")
              for q, c, d, t in sampled]
    rounds = sum(decoding.rounds)
    return OwnPath(blocks, correct, sum(decoding.accepted) / rounds, sum(decoding.decoded) / rounds)


def drifted_blocks(pair: Pair, questions: Sequence[Question], margin: float, count: int, seed: int,
                   progress: Progress, offsets: int = 0) -> list[DraftedBlock]:
    """A sample of `count` blocks on the path that accepts mismatches within a margin; baselines from completions."""
    starts = drawn_offsets(len(questions), offsets, seed + 1)
    sampled = sample(pair.speculative(questions, margin, progress, starts).blocks, count, seed)
    answers = pair.answers([q for q, *_ in sampled], [c for _, c, _, _ in sampled], progress)
    return [_block(q, c, d, t, pair.is_right(ids, q), len(q.prompt_ids) + pair.spoken(ids) - len(c), "drifted")
            for (q, c, d, t), ids in zip(sampled, answers, strict=True)]


def drawn_offsets(count: int, largest: int, seed: int) -> list[int]:
    """Where the first block of each of `count` answers starts: half after the prompt, half up to `largest` tokens on.

    Decoders differ: the recipe's own starts after the prompt, vLLM's prefill always emits a token of the target.
    """
    draw = random.Random(f"offsets {seed}")
    return [draw.randint(1, largest) if largest and draw.random() < 0.5 else 0 for _ in range(count)]


def _block(q: Question, context: list[int], draft: list[int], target: list[int], right: bool, length: int,
           path: str) -> DraftedBlock:
    block_id = f"{q.question_id}/{path}/{len(context) - len(q.prompt_ids)}"
    return DraftedBlock(block_id, q.question_id, context, draft, target, right, length, len(q.prompt_ids))


def harm_labels(pair: Pair, blocks: Sequence[DraftedBlock], questions: dict[str, Question],
                progress: Progress) -> list[HarmLabel]:
    """Label every mismatch of the blocks whose baseline is right.

    Counterfactual: the target completes the context with the draft up to and including the mismatch.
    """
    places = [(b, i) for b in blocks if b.is_correct_baseline for i in mismatches(b.draft_ids, b.target_ids)]
    asked = [questions[b.question_id] for b, _ in places]
    answers = pair.answers(asked, [b.context_ids + b.draft_ids[: i + 1] for b, i in places], progress)
    labels: list[HarmLabel] = []
    broken: set[str] = set()
    for (block, position), question, ids in zip(places, asked, answers, strict=True):
        harmful = not pair.is_right(ids, question)
        labels.append(HarmLabel(block.question_id, block.block_id, position, block.context_ids, block.draft_ids,
                                block.target_ids, harmful, block.block_id in broken))
        if harmful:
            broken.add(block.block_id)
    return labels


def sample(rows: list, count: int, seed: int) -> list:
    """`count` of the rows (all, if there are fewer) in a random order that the seed fixes."""
    return random.Random(seed).sample(rows, min(count, len(rows)))
