"""Block generation with a causal model: a forward predicts a full window, later forwards refine it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from dllm_reasoning.inference.commit_rules import CommitRule, Row, commit_rule
from dllm_reasoning.inference.model_runner import ModelRunner
from dllm_reasoning.inference.settings import GenerationSettings
from verl.models.kv_cache import Prefills, drop_rows
from verl.rollout.hf_rollout import choose
from verl.rollout.sampling import right_padded


@dataclass
class GenerationStats:
    """One entry per row: new tokens, forwards the row took part in (every one counts), refinement rounds of each block.

    `rounds` covers blocks that are refined in place (a number of rounds, converge); slide, verify and branch, which
    commit in every forward, leave it empty. `seconds` and `batch_forwards` cover the entire call.
    """

    tokens: list[int]
    forwards: list[int]
    rounds: list[list[int]]
    batch_forwards: int
    seconds: float

    @property
    def tokens_per_forward(self) -> float:
        return sum(self.tokens) / max(1, sum(self.forwards))

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / self.seconds


@dataclass
class GenerationResult:
    """New tokens of each row, its end token included, and the statistics of the call."""

    tokens: list[list[int]]
    stats: GenerationStats

    def __add__(self, other: "GenerationResult") -> "GenerationResult":
        """The result of both calls."""
        sums = {field.name: getattr(self.stats, field.name) + getattr(other.stats, field.name)
                for field in fields(GenerationStats)}  # fmt: skip
        return GenerationResult(self.tokens + other.tokens, GenerationStats(**sums))


def iterative_generate(
    model: nn.Module, input_ids: torch.Tensor | Sequence[Sequence[int]], eos_token_id: int | Sequence[int],
    pad_token_id: int, *args: Any, attention_mask: torch.Tensor | None = None, first_row: int = 0,
    return_details: bool = False, prefills: Prefills | None = None, **settings: Any,
) -> torch.Tensor | GenerationResult:  # fmt: skip
    """Continue every prompt until its end token, `max_new_tokens`, or `max_length` tokens with the prompt.

    input_ids: lists of ids, or int64 [B, P] with attention_mask [B, P] (1 = token). The other arguments are those of
    GenerationSettings. `first_row` is the number of the first prompt: random draws depend on the seed and a row's
    number only, so a batch split over several calls draws the same. Calls on the same prompts that share `prefills`
    read them once; `seconds` of each include that reading.

    Returns int64 [B, P + longest answer] on the device of `input_ids`: prompts (lists are left-padded to the longest),
    then new tokens, then pad_token_id; with `return_details` a GenerationResult. Raises ValueError for settings or
    prompts that do not fit.
    """
    given = input_ids
    if isinstance(input_ids, torch.Tensor):
        mask = torch.ones_like(input_ids).bool() if attention_mask is None else attention_mask.bool()
        input_ids = [ids[kept].tolist() for ids, kept in zip(input_ids, mask, strict=True)]
    settings = GenerationSettings(*args, **settings)
    prompts = [list(ids) for ids in input_ids]
    if not prompts:
        raise ValueError("input_ids holds no prompt.")
    settings.check_prompts(prompts)
    eos = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    settings = settings.for_model(model.config, eos[0])
    rule, ends = commit_rule(settings), frozenset(eos)
    rows = [
        Row(number, ids, len(ids), min(settings.max_new_tokens, settings.max_length - len(ids)), rule.first_guesses())
        for number, ids in enumerate(prompts, first_row)
    ]
    started, was_training = time.perf_counter(), model.training
    model.eval()
    try:
        with torch.inference_mode():
            # A row's guesses may come after padding as wide as the unread text of another row.
            slots = max(len(row.tokens) + row.limit for row in rows) + 2 * rule.width - 1
            runner = ModelRunner(model, len(rows), slots, pad_token_id, settings.use_cache)
            if prefills is not None:
                started -= runner.prefill(rows, prefills=prefills)
            uniforms = {}
            for row in rows if not settings.sampling.greedy else ():
                # One number per position of an answer: a token whose context is final is drawn the same in every round.
                generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + row.number)
                uniforms[row.number] = torch.rand(row.limit, generator=generator)

            def choose_tokens(logits: torch.Tensor, active: list[Row]) -> tuple[list[list[int]], Any]:
                return _choose(logits, active, uniforms, settings, rule.branch)

            forwards = decode(runner, rows, rule, ends, choose_tokens)
    finally:
        model.train(was_training)
    new = [row.tokens[row.prompt_length :] for row in rows]
    stats = GenerationStats(
        [len(tokens) for tokens in new], [row.forwards for row in rows], [row.rounds_of_blocks for row in rows],
        forwards, time.perf_counter() - started,
    )  # fmt: skip
    if return_details:
        return GenerationResult(new, stats)
    if not isinstance(given, torch.Tensor):
        width = max(row.prompt_length for row in rows)
        pads = [[pad_token_id] * (width - row.prompt_length) for row in rows]
        given = torch.tensor([pad + row.tokens[: row.prompt_length] for pad, row in zip(pads, rows, strict=True)])
    answers = right_padded(new, max(map(len, new)), pad_token_id, given.dtype)
    return torch.cat([given, answers.to(given.device)], 1)


def decode(
    runner: ModelRunner, rows: list[Row], rule: CommitRule, ends: frozenset[int],
    choose_tokens: Callable[[torch.Tensor, list[Row]], tuple[list[list[int]], list[list[float]] | None]],
) -> int:  # fmt: skip
    """Complete all rows; returns the number of forwards.

    `choose_tokens(logits [B, w, V], rows)` gives the predicted tokens [B][w] and their probabilities or log-probs
    [B][w], which the rule may read and rows keep, or None.
    """
    active, forwards = list(rows), 0
    while active:
        rule.prepare(active)
        for row in active:
            row.guesses = row.guesses[: row.remaining - 1]
            row.forwards += 1
        forwards += 1
        tokens, values = choose_tokens(runner.logits(active, rule.branch), active)
        for i, row in enumerate(active):
            fed, value = row.guesses, None if values is None else values[i]
            predicted = tokens[i][: (len(fed) + 1) * (1 + len(rule.branch))]
            value = None if value is None else value[:: 1 + len(rule.branch)]
            rule.committed(row.commit(rule.step(row, predicted, value), fed, ends, value))
        caches = [] if runner.cache is None else [runner.cache]
        active = [active[i] for i in drop_rows([row.done for row in active], caches)]
    return forwards


def _choose(
    logits: torch.Tensor, rows: list[Row], uniforms: dict[int, torch.Tensor], settings: GenerationSettings,
    branch: Sequence[int],
) -> tuple[list[list[int]], list[list[float]] | None]:  # fmt: skip
    """logits [B, w, V] of ModelRunner.logits -> tokens [B][w], greedy or drawn with their rows' uniforms, and, with a
    confidence threshold, their probabilities [B][w]."""
    with_confidence = settings.confidence_threshold is not None
    if settings.sampling.greedy and not with_confidence:
        return logits.argmax(-1).tolist(), None
    shape = logits.shape[:2]
    uniform = torch.zeros(shape, device=logits.device)
    # Places of the columns in the answer, from the first one after the committed tokens.
    after = torch.tensor([sum(divmod(column, 1 + len(branch))) for column in range(shape[1])])
    for i, row in enumerate(rows if uniforms else ()):
        place = (len(row.tokens) - row.prompt_length + after).clamp(max=row.limit - 1)
        uniform[i] = uniforms[row.number][place].to(logits.device)
    tokens, log_probs, _ = choose(logits.flatten(0, 1).float(), uniform.flatten(), settings.sampling)
    return tokens.view(shape).tolist(), log_probs.exp().view(shape).tolist() if with_confidence else None
