"""Target and draft of a test bed, decoded in worker processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from examples.spd_arithmetic.questions import Question
from examples.spd_arithmetic.workers import Progress, Workers
from recipe.spd.answers import is_correct
from recipe.spd.dataset import cut_at_end
from recipe.spd.decoder import Block, Judge, check_tokenizers, end_ids, greedy_generate, speculative_generate

Rule = Callable[[], Judge]
"""Makes a judge in the worker that needs it; picklable."""
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


@dataclass
class Decoding:
    """Speculative decoding of some questions: an entry a question, and every block with a mismatch that was met."""

    tokens: list[list[int]]
    rounds: list[int]  # target forwards
    accepted: list[int]  # draft tokens that stand in `tokens`
    blocks: list[Recorded]


@dataclass(frozen=True)
class Pair:
    """What the two models say; the same whatever the number of workers."""

    files: PairFiles
    decode: Callable[[Sequence[int]], str]
    ends: frozenset[int]  # ids of the end tokens
    workers: Workers

    def is_right(self, answer_ids: Sequence[int], question: Question) -> bool:
        """Whether an ended answer names the right number; one cut at the limit is wrong."""
        ended = bool(answer_ids) and answer_ids[-1] in self.ends
        return ended and is_correct(self.decode(answer_ids), question.ground_truth)

    def spoken(self, ids: Sequence[int]) -> int:
        """Number of tokens before the end token."""
        return len(ids) - (bool(ids) and ids[-1] in self.ends)

    def greedy(self, role: str, prompts: Sequence[list[int]], progress: Progress) -> list[list[int]]:
        """Greedy continuation of every prompt by `target` or `draft`."""
        return list(chain(*self._map(partial(_complete, self.files, role), prompts, progress)))

    def answers(self, questions: Sequence[Question], contexts: Sequence[list[int]], progress: Progress
                ) -> list[list[int]]:
        """The target's answer to each question whose context has begun it; together they have the usual limit."""
        running = [k for k, context in enumerate(contexts) if context[-1] not in self.ends]
        completed = dict(zip(running, self.greedy("target", [contexts[k] for k in running], progress), strict=True))
        whole = zip(questions, (context + completed.get(k, []) for k, context in enumerate(contexts)), strict=True)
        return [ids[len(q.prompt_ids) :][: self.files.max_new_tokens] for q, ids in whole]

    def speculative(
        self, questions: Sequence[Question], rule: Rule, progress: Progress, offsets: Sequence[int] | None = None
    ) -> Decoding:  # fmt: skip
        """Speculative decoding of every question under a rule's judge.

        `offsets`: the first block of each answer starts after so many of the target's own tokens (default: none).
        """
        rows = list(zip(questions, offsets or [0] * len(questions), strict=True))
        parts = self._map(partial(_decode, self.files, rule), rows, progress)
        return Decoding(*(list(chain(*(getattr(part, name) for part in parts)))
                          for name in Decoding.__dataclass_fields__))

    def _map(self, task: Callable[[Sequence], Sequence], rows: Sequence, progress: Progress) -> list:
        return self.workers.map(task, rows, self.files.batch_size, progress)


def open_pair(files: PairFiles, decode: Callable[[Sequence[int]], str], workers: Workers) -> Pair:
    """The pair in these files; two vocabularies are a ValueError."""
    (ends,) = workers.run([partial(_ends, files)], lambda *_: None)
    return Pair(files, decode, ends, workers)


@dataclass(frozen=True)
class _Loaded:
    target: nn.Module
    draft: nn.Module
    ends: frozenset[int]


@cache
def _load(files: PairFiles) -> _Loaded:
    """Both models on the device, once a process; float32 on a CPU, bfloat16 on a GPU."""
    torch.set_num_threads(files.threads)
    disable_progress_bar()  # its lines would cross those of the command
    dtype = torch.float32 if files.device == "cpu" else torch.bfloat16
    target, draft = (AutoModelForCausalLM.from_pretrained(files.folder / name, dtype=dtype).to(files.device).eval()
                     for name in ("target", "draft"))
    tokenizer, other = (AutoTokenizer.from_pretrained(files.folder / name) for name in ("target", "draft"))
    check_tokenizers(tokenizer, other, "the draft")
    ends = end_ids(target.generation_config.eos_token_id) or end_ids(tokenizer.eos_token_id)
    return _Loaded(target, draft, ends)


def _ends(files: PairFiles) -> frozenset[int]:
    return _load(files).ends


def _complete(files: PairFiles, role: str, prompts: Sequence[list[int]]) -> list[list[int]]:
    loaded = _load(files)
    model = {"target": loaded.target, "draft": loaded.draft}[role]
    return greedy_generate(model, prompts, max_new_tokens=files.max_new_tokens, eos_token_id=loaded.ends,
                           batch_size=files.batch_size).tokens


def _decode(files: PairFiles, rule: Rule, rows: Sequence[tuple[Question, int]]) -> Decoding:
    loaded = _load(files)
    questions, offsets = zip(*rows, strict=True)
    limits = {"eos_token_id": loaded.ends, "batch_size": files.batch_size}
    begun = [[] for _ in rows]
    if longest := max(offsets):
        own = greedy_generate(loaded.target, [q.prompt_ids for q in questions], max_new_tokens=longest, **limits)
        begun = [ids[:offset] for ids, offset in zip(own.tokens, offsets, strict=True)]
        begun = [[] if loaded.ends.intersection(ids) else ids for ids in begun]  # a short answer starts at its begin
    blocks: list[Recorded] = []

    def keep(block: Block, accepted: torch.Tensor) -> None:
        columns = (block.rows.tolist(), block.context_ids, block.draft_ids.tolist(), block.target_ids.tolist())
        for row, context, draft, target in zip(*columns, strict=True):
            draft, target = cut_at_end(draft, target, loaded.ends)
            if draft != target[:-1]:
                blocks.append((questions[row], list(context), draft, target))

    result = speculative_generate(
        loaded.target, loaded.draft, [q.prompt_ids + ids for q, ids in zip(questions, begun, strict=True)], rule(),
        gamma=files.gamma, max_new_tokens=files.max_new_tokens, on_block=keep, **limits)
    tokens = [(ids + more)[: files.max_new_tokens] for ids, more in zip(begun, result.tokens, strict=True)]
    return Decoding(tokens, result.rounds, result.accepted, blocks)
