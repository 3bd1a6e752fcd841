"""Block generation with a causal model: a forward predicts a full window, later forwards refine it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dllm_reasoning.inference.commit_rules import CommitRule, Row, commit_rule
from dllm_reasoning.inference.model_runner import ModelRunner
from dllm_reasoning.inference.settings import GenerationSettings
from verl.models.kv_cache import Prefills, drop_rows
from verl.rollout.hf_rollout import choose
from verl.rollout.sampling import Sampling, right_padded

ChooseTokens = Callable[[torch.Tensor, Sequence[Row]], tuple[list[list[int]], list[list[float]] | None]]
"""From the logits [B, w, V] of a forward and its rows: the predicted tokens [B][w], and their log-probs [B][w] or None.
"""


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


@dataclass
class GenerationResult:
    """New tokens of each row, its end token included, and the statistics of the call."""

    tokens: list[list[int]]
    stats: GenerationStats

    def __add__(self, other: "GenerationResult") -> "GenerationResult":
        """The result of both calls."""
        sums = {name: value + getattr(other.stats, name) for name, value in vars(self.stats).items()}
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
    rows = []
    for number, ids in enumerate(prompts):
        limit = min(settings.max_new_tokens, settings.max_length - len(ids))
        rows.append(Row(number, [*ids], len(ids), limit, rule.first_guesses()))
    choose_tokens: ChooseTokens = likeliest_tokens
    if not settings.sampling.greedy or settings.confidence_threshold is not None:
        seeds = [settings.seed * 1_000_003 + first_row + row.number for row in rows]
        choose_tokens = SeededDraws(settings.sampling, seeds, settings.max_new_tokens, len(rule.branch), filtered=False)
    started, was_training = time.perf_counter(), model.training
    model.eval()
    try:
        with torch.inference_mode():
            # A row's guesses may come after padding as wide as the unread text of another row.
            slots = max(len(row.tokens) + row.limit for row in rows) + 2 * rule.width - 1
            runner = ModelRunner(model, len(rows), slots, pad_token_id, settings.use_cache)
            if prefills is not None:
                started -= runner.prefill(rows, prefills=prefills)
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
        width = max(map(len, prompts))
        given = torch.tensor([[pad_token_id] * (width - len(ids)) + ids for ids in prompts])
    answers = right_padded(new, max(map(len, new)), pad_token_id, given.dtype)
    return torch.cat([given, answers.to(given.device)], 1)


def decode(
    runner: ModelRunner, rows: list[Row], rule: CommitRule, ends: frozenset[int], choose_tokens: ChooseTokens
) -> int:
    """Complete all rows; returns the number of forwards."""
    active, forwards = list(rows), 0
    stride = 1 + len(rule.branch)  # columns of a token: that after it, and those after the tokens of its branch
    while active:
        rule.prepare(active)
        for row in active:
            row.guesses = row.guesses[: row.remaining - 1]
            row.forwards += 1
        forwards += 1
        tokens, log_probs = choose_tokens(runner.logits(active, rule.branch), active)
        for i, row in enumerate(active):
            fed = row.guesses
            predicted = tokens[i][: (1 + len(fed)) * stride]
            row_log_probs = None if log_probs is None else log_probs[i][::stride]
            kept = row.commit(rule.step(row, predicted, row_log_probs), fed, ends, row_log_probs)
            rule.committed(kept)
        caches = [] if runner.cache is None else [runner.cache]
        active = [active[i] for i in drop_rows([row.done for row in active], caches)]
    return forwards


def likeliest_tokens(logits: torch.Tensor, rows: Sequence[Row]) -> tuple[list[list[int]], None]:
    """logits [B, w, V] -> greedy tokens [B][w], without log-probs."""
    return logits.argmax(-1).tolist(), None


class SeededDraws:
    """Tokens of each forward for `decode`, with their log-probs; row number i draws with seeds[i].

    A position of an answer has one uniform number, so that a token whose context is final is the same in every forward.
    `limit`: positions of an answer; `branch`: tokens of a branch (CommitRule); `filtered`: as for `choose`.
    """

    def __init__(
        self, sampling: Sampling, seeds: Sequence[int], limit: int, branch: int = 0, filtered: bool = True
    ) -> None:
        self.sampling, self.stride, self.filtered = sampling, 1 + branch, filtered
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.uniforms = torch.stack([torch.rand(limit, generator=g) for g in generators])  # [rows, limit]

    def __call__(self, logits: torch.Tensor, rows: Sequence[Row]) -> tuple[list[list[int]], list[list[float]]]:
        """logits [B, w, V] of ModelRunner.logits -> tokens and log-probs [B][w]."""
        column = torch.arange(logits.shape[1])
        after = column // self.stride + column % self.stride  # a branch continues the answer after its token
        number = torch.tensor([[row.number] for row in rows])
        place = torch.tensor([[len(row.tokens) - row.prompt_length] for row in rows]) + after  # [B, w]
        uniform = self.uniforms[number, place.clamp(max=self.uniforms.shape[1] - 1)].to(logits.device)
        flat = logits.flatten(0, 1).float()
        tokens, log_probs, _ = choose(flat, uniform.flatten(), self.sampling, self.filtered)
        return tokens.view(place.shape).tolist(), log_probs.view(place.shape).tolist()
