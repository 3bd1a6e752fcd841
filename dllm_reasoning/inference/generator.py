"""Block generation with a causal model: a forward predicts a whole window, later forwards refine it.

    found = iterative_generate(model, prompts, eos_token_id, pad_token_id, refine_iter="slide")
    found.tokens, found.stats.tokens_per_forward
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dllm_reasoning.inference.commit_rules import CommitRule, Row, commit_rule
from dllm_reasoning.inference.reader import Reader
from dllm_reasoning.utils.logging_utils import warn_once
from verl.workers.rollout.hf_rollout import choose
from verl.workers.rollout.sampling import Sampling

ADD_EOS_LENGTH = 127  # of a model that does not say which window it was trained on
WINDOW_KEY, NOISE_KEY = "dllm_window", "dllm_noise_token_id"  # in the model's config.json


@dataclass
class GenerationStats:
    """One entry a row: new tokens, forwards the row took part in (every one counts), refinement rounds of each block.

    `rounds` is of blocks that are refined in place (a number of rounds, converge); slide and verify, which commit in
    every forward, leave it empty. `seconds` and `batch_forwards` are of the whole call.
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

    @property
    def rounds_per_block(self) -> float:
        """Mean number of refinement rounds of a block; 0 for slide and verify."""
        rounds = [n for row in self.rounds for n in row]
        return sum(rounds) / max(1, len(rounds))


@dataclass
class GenerationResult:
    """New tokens of each row, its end token included, and how they came about."""

    tokens: list[list[int]]
    stats: GenerationStats


def iterative_generate(
    model: nn.Module,
    input_ids: torch.Tensor | Sequence[Sequence[int]],
    eos_token_id: int | Sequence[int],
    pad_token_id: int,
    add_eos_length: int | None = None,
    refine_iter: int | str = 2,
    max_new_tokens: int = 1024,
    max_length: int = 8192,
    *,
    attention_mask: torch.Tensor | None = None,
    noise_token_id: int | None = None,
    confidence_threshold: float | None = None,
    temperature: float = 0.0,
    top_k: int = -1,
    top_p: float = 1.0,
    seed: int = 0,
    first_row: int = 0,
    use_cache: bool = True,
) -> GenerationResult:
    """Continue every prompt until its end token, `max_new_tokens`, or `max_length` tokens with the prompt.

    input_ids: lists of ids, or [B, T] with attention_mask [B, T] (1 = text). A window holds add_eos_length + 1 tokens:
    as the model was trained (its config's dllm_window), else 128. refine_iter: rounds after a block's first forward (a
    round that changes nothing ends them), or `converge`, `slide`, `verify`, which give what decoding token by token
    gives, with the same draws where temperature is above 0. Rows stop on their own. Draws hang on `seed` and on a row's
    number, counted from `first_row`: a batch in several calls draws as in one.
    """
    config = model.config.to_dict()
    eos = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    ends = frozenset(eos)
    width = _width(add_eos_length, config)
    noise = noise_token_id if noise_token_id is not None else config[NOISE_KEY] if NOISE_KEY in config else eos[0]
    rule = commit_rule(refine_iter, width, noise, confidence_threshold)
    sampling = Sampling(temperature == 0, temperature or 1.0, top_k, top_p)
    rows = _rows(input_ids, attention_mask, max_new_tokens, max_length, rule, first_row)
    started, forwards = time.perf_counter(), 0
    with _evaluating(model), torch.inference_mode():
        active = list(rows)
        # A row's guesses, behind padding as wide as what another row has still to read.
        slots = max(len(row.tokens) + row.limit for row in rows) + 2 * len(rule.fresh()) + 1
        reader = Reader(model, active, slots, pad_token_id, use_cache)
        speaker = _Speaker(sampling, rule, {row.number: (seed, row.limit) for row in rows})
        while active:
            for row in active:
                row.guesses = row.guesses[: row.remaining - 1]
                row.forwards += 1
            forwards += 1
            said, confidence = speaker(reader.logits(active), active)
            for i, row in enumerate(active):
                count = len(row.guesses) + 1
                sure = None if confidence is None else confidence[i][:count]
                fed = row.guesses
                row.commit(rule.step(row, said[i][:count], sure), fed, ends)
            active = reader.drop_done(active)
    new = [row.tokens[row.prompt_length :] for row in rows]
    stats = GenerationStats(
        [len(tokens) for tokens in new], [row.forwards for row in rows], [row.rounds_of_blocks for row in rows],
        forwards, time.perf_counter() - started,
    )  # fmt: skip
    return GenerationResult(new, stats)


class _Speaker:
    """What the model says at each place: greedy, or drawn with a number that belongs to (row, place in the answer), so
    that a token, once everything before it is settled, is drawn the same in every round."""

    def __init__(self, sampling: Sampling, rule: CommitRule, draws: dict[int, tuple[int, int]]) -> None:
        self.sampling, self.rule = sampling, rule
        self.uniforms = {} if sampling.greedy else {n: _uniforms(seed, n, limit) for n, (seed, limit) in draws.items()}

    def __call__(self, logits: torch.Tensor, rows: list[Row]) -> tuple[list[list[int]], list[list[float]] | None]:
        """logits [B, w, V] -> tokens, and their probabilities where the rule asks for them."""
        if self.sampling.greedy and not self.rule.needs_confidence:
            return logits.argmax(-1).tolist(), None
        shape = logits.shape[:2]
        uniform = torch.zeros(shape, device=logits.device)
        if not self.sampling.greedy:
            for i, row in enumerate(rows):
                done = len(row.tokens) - row.prompt_length
                part = self.uniforms[row.number][done : done + shape[1]]
                uniform[i, : len(part)] = part.to(logits.device)
        tokens, log_probs = choose(logits.flatten(0, 1).float(), uniform.flatten(), self.sampling)
        confidence = log_probs.exp().view(shape).tolist() if self.rule.needs_confidence else None
        return tokens.view(shape).tolist(), confidence


def _uniforms(seed: int, row: int, limit: int) -> torch.Tensor:
    return torch.rand(limit, generator=torch.Generator().manual_seed(seed * 1_000_003 + row))


def trained_window(config: dict[str, Any]) -> int | None:
    """W of a model trained by iterative refinement."""
    return config[WINDOW_KEY] if WINDOW_KEY in config else None


def _width(add_eos_length: int | None, config: dict[str, Any]) -> int:
    trained = trained_window(config)
    if add_eos_length is None:
        return trained or ADD_EOS_LENGTH + 1
    if add_eos_length < 0:
        raise ValueError(f"add_eos_length={add_eos_length} is below 0; 0 decodes token by token.")
    if trained is not None and add_eos_length + 1 > trained:
        warn_once(
            f"add_eos_length={add_eos_length} makes blocks of {add_eos_length + 1} tokens, but the model was trained "
            f"on windows of {trained}: expect wrong answers with a fixed refine_iter, and no gain from the lossless "
            f"modes; leave it out to get {trained - 1}"
        )
    return add_eos_length + 1


def _rows(
    input_ids: torch.Tensor | Sequence[Sequence[int]], attention_mask: torch.Tensor | None, max_new_tokens: int,
    max_length: int, rule: CommitRule, first_row: int,
) -> list[Row]:  # fmt: skip
    if isinstance(input_ids, torch.Tensor):
        kept = torch.ones_like(input_ids).bool() if attention_mask is None else attention_mask.bool()
        prompts = [ids[mask].tolist() for ids, mask in zip(input_ids, kept, strict=True)]
    else:
        prompts = [list(ids) for ids in input_ids]
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} is below 1.")
    if not prompts:
        raise ValueError("input_ids holds no prompt.")
    check_lengths(prompts, max_length)
    rows = [Row(number, ids, len(ids), min(max_new_tokens, max_length - len(ids)))
            for number, ids in enumerate(prompts, first_row)]  # fmt: skip
    for row in rows:
        row.guesses = rule.fresh()
    return rows


def check_lengths(prompts: Sequence[Sequence[int]], max_length: int) -> None:
    """ValueError that names a prompt which leaves no room for an answer, or is empty."""
    for number, ids in enumerate(prompts):
        if not 0 < len(ids) < max_length:
            raise ValueError(f"prompt {number} has {len(ids)} tokens; it needs at least one, and fewer than "
                             f"max_length={max_length}.")  # fmt: skip


@contextmanager
def _evaluating(model: nn.Module):
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
