"""Target and draft of a test bed, decoded in worker processes."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, count
from pathlib import Path
from types import ModuleType
from typing import Any

from loguru import logger
from transformers import AutoConfig, AutoTokenizer

from examples.spd_arithmetic.questions import Question, is_right
from examples.spd_arithmetic.workers import Progress, Workers
from verl.utils.tokenizer import check_tokenizers, stop_ids

EXACT, EVERYTHING = -math.inf, math.inf
"""Margins (scripts/spd_evaluation/rules.py) by which no mismatch is accepted, and every one."""
Recorded = tuple[Question, list[int], list[int], list[int]]
"""Question, context, draft and target ids of a block."""


@dataclass(frozen=True)
class PairFiles:
    """A folder with target/ and draft/, and how they are decoded."""

    folder: Path
    device: str
    threads: int
    gamma: int
    max_new_tokens: int
    batch_size: int
    engine: str = "hf"  # hf: transformers in plain batches; vllm: vLLM's offline engine
    longest: int = 0  # tokens of a prompt; for vllm
    tensor_parallel: int = 1  # GPUs that share the target; for vllm
    kept: Path | None = None  # folder of finished parts, with which a killed run resumes
    memory_shares: tuple[float, float] = (0.6, 0.25)  # of each GPU, for target and draft; for vllm
    dtype: str = "float32"  # of both models


@dataclass
class Decoding:
    """Speculative decoding of some questions: an entry per question, and every block with a mismatch that was met."""

    tokens: list[list[int]]
    rounds: list[int]  # target forwards
    accepted: list[int]  # draft tokens that stand in `tokens`
    blocks: list[Recorded]
    decoded: list[int] = field(default_factory=list)  # tokens that the forwards gave, before answers are cut

    def part(self, questions: Sequence[Question], first: int) -> "Decoding":
        """The entries of these questions, of which the first one has number `first`."""
        ids, last = {q.question_id for q in questions}, first + len(questions)
        lists = (values[first:last] for values in (self.tokens, self.rounds, self.accepted))
        return Decoding(*lists, [block for block in self.blocks if block[0].question_id in ids],
                        self.decoded[first:last])


@dataclass(frozen=True)
class Pair:
    """What the two models say; the same whatever the number of workers."""

    files: PairFiles
    decode: Callable[[Sequence[int]], str]
    ends: frozenset[int]  # ids of the end tokens
    workers: Workers
    _numbers: Iterator[int] = field(default_factory=count)  # of the calls of `_map`, equal in every run

    def is_right(self, answer_ids: Sequence[int], question: Question) -> bool:
        """Whether an answer to the question has ended and names the right number."""
        return is_right(answer_ids, question.ground_truth, self.decode, self.ends)

    def spoken(self, ids: Sequence[int]) -> int:
        """Number of tokens before the end token."""
        return len(ids) - (bool(ids) and ids[-1] in self.ends)

    def greedy(self, role: str, prompts: Sequence[list[int]], progress: Progress, limits: Sequence[int] | None = None
               ) -> list[list[int]]:  # fmt: skip
        """Greedy continuation of every prompt by `target` or `draft`, of at most `limits` tokens (default: those of an
        answer).
        """
        rows = list(zip(prompts, limits or [self.files.max_new_tokens] * len(prompts), strict=True))
        return list(chain(*self._map(partial(self._tasks.complete, self.files, role), rows, progress)))

    def answers(self, questions: Sequence[Question], contexts: Sequence[list[int]], progress: Progress
                ) -> list[list[int]]:
        """The target's answer to each question whose context has begun it; together they have the usual limit."""
        begun = [context[len(q.prompt_ids) :] for q, context in zip(questions, contexts, strict=True)]
        left = [self.files.max_new_tokens - len(ids) for ids in begun]
        running = [k for k, context in enumerate(contexts) if context[-1] not in self.ends and left[k] > 0]
        made = self.greedy("target", [contexts[k] for k in running], progress, [left[k] for k in running])
        completed = dict(zip(running, made, strict=True))
        return [(ids + completed.get(k, []))[: self.files.max_new_tokens] for k, ids in enumerate(begun)]

    def speculative(
        self, questions: Sequence[Question], margin: float, progress: Progress, offsets: Sequence[int] | None = None
    ) -> Decoding:
        """Speculative decoding of every question: a mismatch is accepted if the target's logit of its own token is
        larger by at most `margin`.

        `offsets`: the first block of each answer starts after so many of the target's own tokens (default: none). The
        blocks are ordered by question and place, and may need `complete_blocks`.
        """
        offsets = offsets or [0] * len(questions)
        rows = list(zip((q.prompt_ids for q in questions), offsets, strict=True))
        whole, blocks = Decoding([], [], [], []), []
        for part in self._map(partial(self._tasks.decode, self.files, margin), rows, progress):
            blocks += [(len(whole.tokens) + row, *block) for row, *block in part.pop("blocks")]
            for name, values in part.items():
                getattr(whole, name).extend(values)
        # After an offset a block may start where the answer would have been cut: nothing could follow it.
        for row, start, draft, target in sorted(block for block in blocks if block[1] < self.files.max_new_tokens):
            question = questions[row]
            context = question.prompt_ids + whole.tokens[row][:start]
            whole.blocks.append((question, context, draft, target))
        # An answer that ends among the tokens before its first block is decoded from its beginning.
        whole.decoded = [len(ids) - (offset if len(ids) > offset else 0)
                         for ids, offset in zip(whole.tokens, offsets, strict=True)]
        whole.tokens = [ids[: self.files.max_new_tokens] for ids in whole.tokens]
        return whole

    def complete_blocks(self, blocks: Sequence[Recorded], progress: Progress) -> list[Recorded]:
        """The blocks with their whole drafts, and with the target's predictions along them."""
        parts = self._map(partial(self._tasks.complete_blocks, self.files), [b[1:] for b in blocks], progress)
        return [(q, context, *ids) for (q, context, *_), ids in zip(blocks, chain(*parts), strict=True)]

    @property
    def _tasks(self) -> ModuleType:
        from examples.spd_arithmetic import hf_tasks, vllm_tasks

        return {"hf": hf_tasks, "vllm": vllm_tasks}[self.files.engine]

    def _map(self, task: Callable[[Sequence], Any], rows: Sequence, progress: Progress) -> list:
        kept = None if self.files.kept is None else self.files.kept / str(next(self._numbers))
        return self.workers.map(task, rows, self.files.batch_size, progress, kept)


def open_pair(files: PairFiles, decode: Callable[[Sequence[int]], str], workers: Workers) -> Pair:
    """The pair in these files; two vocabularies are a ValueError."""
    tokenizers = (AutoTokenizer.from_pretrained(files.folder / name) for name in ("target", "draft"))
    check_tokenizers(*tokenizers, "the draft")
    configs = (AutoConfig.from_pretrained(files.folder / name).get_text_config() for name in ("target", "draft"))
    if len(sizes := dict.fromkeys(config.vocab_size for config in configs)) > 1:
        what = "embeddings of {:,} and {:,} rows for the same tokens: vLLM serves the pair and drafts no padding"
        logger.info(f"target and draft have {what}", *sizes)
    return Pair(files, decode, end_tokens(files.folder), workers)


@cache
def end_tokens(folder: Path) -> frozenset[int]:
    """The target's end tokens."""
    return frozenset(stop_ids(AutoTokenizer.from_pretrained(folder / "target")))
