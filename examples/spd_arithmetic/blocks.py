"""Drafted blocks from real speculative decoding, and counterfactual labels of what each mismatch does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from examples.spd_arithmetic.questions import Question
from scripts.spd_evaluation.rules import exact
from verl.workers.rollout.spd.answers import extract_answer
from verl.workers.rollout.spd.decode import Block, Judge, SpecResult, greedy_generate, speculative_generate

Progress = Callable[[int, int], None]
"""Called with (done, in all)."""


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
class Pair:
    """Target and draft, and how they are decoded and checked."""

    target: nn.Module
    draft: nn.Module
    decode: Callable[[Sequence[int]], str]
    eos_token_id: int | Sequence[int]
    gamma: int
    max_new_tokens: int
    batch_size: int

    @property
    def ends(self) -> frozenset[int]:
        """Ids of the end tokens."""
        return frozenset([self.eos_token_id] if isinstance(self.eos_token_id, int) else self.eos_token_id)

    def is_right(self, answer_ids: Sequence[int], question: Question) -> bool:
        """Whether an ended answer names the right number; one cut at the limit is wrong."""
        ended = bool(answer_ids) and answer_ids[-1] in self.ends
        return ended and extract_answer(self.decode(answer_ids)) == question.ground_truth

    def greedy(self, model: nn.Module, prompts: Sequence[list[int]], progress: Progress) -> list[list[int]]:
        """The model's own greedy continuation of every prompt."""
        tokens: list[list[int]] = []
        for chunk in _chunks(prompts, self.batch_size, progress):
            result = greedy_generate(model, chunk, max_new_tokens=self.max_new_tokens, eos_token_id=self.eos_token_id,
                                     batch_size=self.batch_size)
            tokens += result.tokens
        return tokens

    def speculative(self, questions: Sequence[Question], judge: Judge,
                    on_block: Callable[[Block, torch.Tensor], None] | None = None) -> SpecResult:
        """Speculative decoding of every question under a judge."""
        return speculative_generate(
            self.target, self.draft, [q.prompt_ids for q in questions], judge, gamma=self.gamma,
            max_new_tokens=self.max_new_tokens, eos_token_id=self.eos_token_id, batch_size=self.batch_size,
            on_block=on_block)


Recorded = tuple[Question, list[int], list[int], list[int]]
"""Question, context, draft and target ids of a block."""


def record_blocks(pair: Pair, questions: Sequence[Question], judge: Judge,
                  progress: Progress) -> tuple[list[Recorded], list[SpecResult]]:
    """Every block with a mismatch that is met while decoding under `judge`, and the decodings, one a batch."""
    found: list[Recorded] = []
    results = []
    for chunk in _chunks(questions, pair.batch_size, progress):

        def keep(block: Block, accepted: torch.Tensor, chunk: Sequence[Question] = chunk) -> None:
            columns = (block.rows.tolist(), block.context_ids, block.draft_ids.tolist(), block.target_ids.tolist())
            for row, context, draft, target in zip(*columns, strict=True):
                draft, target = cut_at_end(draft, target, pair.ends)
                if draft != target[:-1]:
                    found.append((chunk[row], list(context), draft, target))

        results.append(pair.speculative(chunk, judge, keep))
    return found, results


def cut_at_end(draft: list[int], target: list[int], ends: frozenset[int]) -> tuple[list[int], list[int]]:
    """Drop what a draft says after its own end token: nobody ever reads it."""
    end = next((i for i, token in enumerate(draft) if token in ends), None)
    return (draft, target) if end is None else (draft[: end + 1], target[: end + 2])


@dataclass(frozen=True)
class OwnPath:
    """Exact-match decoding of some questions: its blocks, and which of the target's own answers are right."""

    blocks: list[DraftedBlock]
    correct: dict[str, bool]
    accepted_per_forward: float
    tokens_per_forward: float


def own_path(pair: Pair, questions: Sequence[Question], count: int, seed: int, progress: Progress) -> OwnPath:
    """Decode by exact match, which is the target's own greedy text, and sample `count` of the blocks met."""
    found, results = record_blocks(pair, questions, exact(), progress)
    if count and not found:
        raise ValueError(f"draft and target agree on every token of {len(questions)} questions, so there is "
                         "nothing to judge; use another draft")
    answers = [tokens for result in results for tokens in result.tokens]
    correct = {q.question_id: pair.is_right(ids, q) for q, ids in zip(questions, answers, strict=True)}
    lengths = {q.question_id: len(q.prompt_ids) + _spoken(ids, pair) for q, ids in zip(questions, answers, strict=True)}
    blocks = [_block(q, c, d, t, correct[q.question_id], lengths[q.question_id] - len(c), "own")
              for q, c, d, t in sample(found, count, seed)]
    rounds = sum(sum(result.rounds) for result in results)
    accepted = sum(sum(result.accepted) for result in results)
    return OwnPath(blocks, correct, accepted / rounds, sum(map(len, answers)) / rounds)


def drifted_blocks(pair: Pair, questions: Sequence[Question], judge: Judge, count: int, seed: int,
                   progress: Progress) -> list[DraftedBlock]:
    """A sample of `count` blocks on the path of a lenient judge; each baseline is found by a completion."""
    found = sample(record_blocks(pair, questions, judge, progress)[0], count, seed)
    completed = pair.greedy(pair.target, [c for _, c, _, _ in found], progress)
    return [_block(q, c, d, t, pair.is_right(c[len(q.prompt_ids) :] + more, q), _spoken(more, pair), "drifted")
            for (q, c, d, t), more in zip(found, completed, strict=True)]


def _spoken(ids: Sequence[int], pair: Pair) -> int:
    """Number of tokens before the end token."""
    return len(ids) - (bool(ids) and ids[-1] in pair.ends)


def _block(q: Question, context: list[int], draft: list[int], target: list[int], right: bool, length: int,
           path: str) -> DraftedBlock:
    block_id = f"{q.question_id}/{path}/{len(context) - len(q.prompt_ids)}"
    return DraftedBlock(block_id, q.question_id, context, draft, target, right, length)


def harm_labels(pair: Pair, blocks: Sequence[DraftedBlock], questions: dict[str, Question],
                progress: Progress) -> list[HarmLabel]:
    """Label every mismatch of the blocks whose baseline is right.

    Counterfactual: the target completes the context with the draft up to and including the mismatch.
    """
    places = [(b, i) for b in blocks if b.is_correct_baseline for i in mismatches(b)]
    hybrids = [b.context_ids + b.draft_ids[: i + 1] for b, i in places]
    running = [k for k, hybrid in enumerate(hybrids) if hybrid[-1] not in pair.ends]
    completed = pair.greedy(pair.target, [hybrids[k] for k in running], progress)
    for k, more in zip(running, completed, strict=True):
        hybrids[k] = hybrids[k] + more
    labels: list[HarmLabel] = []
    broken: set[str] = set()
    for (block, position), hybrid in zip(places, hybrids, strict=True):
        question = questions[block.question_id]
        harmful = not pair.is_right(hybrid[len(question.prompt_ids) :], question)
        labels.append(HarmLabel(block.question_id, block.block_id, position, block.context_ids, block.draft_ids,
                                block.target_ids, harmful, block.block_id in broken))
        if harmful:
            broken.add(block.block_id)
    return labels


def mismatches(block: DraftedBlock) -> list[int]:
    """Positions where draft and target differ."""
    return [i for i, (d, t) in enumerate(zip(block.draft_ids, block.target_ids, strict=False)) if d != t]


def sample(rows: list, count: int, seed: int) -> list:
    """`count` of the rows (all, if there are fewer) in a random order that the seed fixes."""
    return random.Random(seed).sample(rows, min(count, len(rows)))


def _chunks(rows: Sequence, size: int, progress: Progress) -> Iterator[Sequence]:
    progress(0, len(rows))
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
        progress(min(start + size, len(rows)), len(rows))
