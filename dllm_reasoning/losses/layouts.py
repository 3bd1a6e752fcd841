"""Lays out a micro-batch as a clean prefix and a noised tail that attends to it.

Rows: the tail is the full sample, as plain SFT sees it, or, if split, [last instruction token, response] after the
instruction. Packed: the prefix is the full clean sample, the tail holds windows [last committed token, noise, ...].
Shapes: B rows, T tokens of a sample, P of the prefix, Q of the tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from dllm_reasoning.config.iterative import IterativeConfig
from dllm_reasoning.utils.noise_utils import PATTERNS, noise_level, q_sample, row_generator, window_starts

IGNORED = -100


@dataclass
class Tokens:
    """A token stream: ids, positions, labels int64 and valid bool (True = not padding), each [B, N].

    labels: the token to predict at each position; IGNORED where none counts.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    valid: torch.Tensor
    labels: torch.Tensor

    @property
    def columns(self) -> tuple[torch.Tensor, ...]:
        return self.ids, self.positions, self.valid, self.labels

    def count(self) -> int:
        """Number of labels that count."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device | str) -> Tokens:
        return Tokens(*(column.to(device) for column in self.columns))

    def then(self, other: Tokens) -> Tokens:
        """This stream [B, N] followed by another [B, M] -> [B, N + M]."""
        return Tokens(*(torch.cat(pair, 1) for pair in zip(self.columns, other.columns, strict=True)))


@dataclass
class Layout:
    """A tail [B, Q], decoded again between rounds where `region` (bool [B, Q]) is True, after a prefix [B, P] or none.

    attention_mask: bool [B, Q, P + Q], which tokens of prefix and tail a tail token attends to; None (no prefix):
    causal over valid tokens. clean: int64 [B, Q], the tail's ids without noise. noised: number of noise tokens.
    whole_prefix: the prefix is the clean sample with a loss of its own.
    """

    prefix: Tokens | None
    tail: Tokens
    region: torch.Tensor
    clean: torch.Tensor
    attention_mask: torch.Tensor | None
    noised: int
    whole_prefix: bool = False

    def flat_tail(self) -> Layout:
        """The rows of the tail one after another in one row, without the prefix."""
        tail = Tokens(*(column.reshape(1, -1) for column in self.tail.columns))
        return Layout(None, tail, self.region.reshape(1, -1), self.clean.reshape(1, -1), None, self.noised)

    def to(self, device: torch.device | str) -> Layout:
        parts = {name: getattr(self, name) for name in ("prefix", "tail", "region", "clean", "attention_mask")}
        return replace(self, **{name: None if part is None else part.to(device) for name, part in parts.items()})


def build_layout(
    batch: dict[str, torch.Tensor], seeds: Sequence[int], noise: IterativeConfig, noise_token: int, *,
    progress: float = 0.0, split: bool = False,
) -> Layout:  # fmt: skip
    """The layout of right-padded rows: input_ids, attention_mask, position_ids, response_mask (1 = response), int64
    [B, T] each, on the CPU.

    seeds: one per row. noise: pattern, levels and widths. progress: of the run, in [0, 1]. split: separate the
    instruction, so that rounds can share it (packed layouts always do).
    """
    pattern = PATTERNS[noise.noise_pattern]
    if pattern.windows:
        return _packed(batch, seeds, noise, noise_token)
    ids, responses = batch["input_ids"], batch["response_mask"].bool()
    noised, region = torch.zeros_like(responses), torch.zeros_like(responses)
    for i, seed in enumerate(seeds):
        generator = row_generator(seed)
        level = noise_level(noise.noise_schedule, noise.noise_min, noise.noise_max, progress, generator)
        drawn = pattern.positions(int(responses[i].sum()), level, noise.block_length, generator)
        noised[i, responses[i]], region[i, responses[i]] = drawn
    tail = Tokens(
        q_sample(ids, responses, noised, noise_token), batch["position_ids"], batch["attention_mask"].bool(),
        _next_labels(ids, responses),
    )  # fmt: skip
    rows = Layout(None, tail, region, ids, None, int(noised.sum()))
    return _split(rows, responses) if split else rows


def count_labels(response_mask: torch.Tensor, seeds: Sequence[int], noise: IterativeConfig) -> int:
    """Labels of a round in the layouts of rows with this response_mask [B, T], without building them."""
    lengths = response_mask.sum(1).tolist()
    if not PATTERNS[noise.noise_pattern].windows:
        return sum(lengths)
    width, starts = noise.block_length, _starts(lengths, seeds, noise)
    return sum(min(width, n - start) for n, drawn in zip(lengths, starts, strict=True) for start in drawn)


def _starts(lengths: Sequence[int], seeds: Sequence[int], noise: IterativeConfig) -> list[list[int]]:
    """Where the windows begin in responses of these lengths."""
    settings = {"width": noise.block_length, "aligned": noise.aligned_windows}
    return [window_starts(length, noise.windows_per_sample, row_generator(seed), **settings)
            for length, seed in zip(lengths, seeds, strict=True)]  # fmt: skip


def _next_labels(ids: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """The token after each position if it is a response token, else IGNORED. [B, T] -> [B, T]."""
    labels = torch.full_like(ids, IGNORED)
    labels[:, :-1] = torch.where(responses[:, 1:], ids[:, 1:], IGNORED)
    return labels


def _split(rows: Layout, responses: torch.Tensor) -> Layout:
    """Instructions without their last token as prefix, the rest as tail; both right-padded. responses: bool [B, T]."""
    ends = rows.tail.valid.sum(1)
    starts = torch.where(responses.any(1), responses.int().argmax(1), ends - 1)  # [B]: the first response token
    prefix = _cut(rows.tail, [slice(0, start - 1) for start in starts.tolist()])
    # From the last instruction token on; EOS is never an input.
    tail_slices = [slice(start - 1, end - 1) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    tail = _cut(rows.tail, tail_slices)
    width = tail.ids.shape[1]
    own = torch.ones(width, width, dtype=torch.bool).tril() & tail.valid.unsqueeze(1)
    own |= torch.eye(width, dtype=torch.bool)  # padding attends to itself
    cross = prefix.valid.unsqueeze(1).expand(-1, width, -1)
    region = pad_sequence([row[part] for row, part in zip(rows.region, tail_slices, strict=True)], batch_first=True)
    clean = pad_sequence([row[part] for row, part in zip(rows.clean, tail_slices, strict=True)], batch_first=True)
    attention_mask = torch.cat([cross, own], 2)
    return replace(rows, prefix=prefix, tail=tail, region=region, clean=clean, attention_mask=attention_mask)


def _cut(tokens: Tokens, slices: list[slice]) -> Tokens:
    """One slice of each row, right-padded to at least one column: if every instruction is one token, the prefix is a
    padding token that nothing attends to, so that each rank makes the same forwards."""
    columns = []
    for column, padding in zip(tokens.columns, (0, 0, False, IGNORED), strict=True):
        parts = [row[part] for row, part in zip(column, slices, strict=True)]
        cut = pad_sequence(parts, batch_first=True, padding_value=padding)
        columns.append(cut if cut.shape[1] else pad(cut, (0, 1), value=padding))
    return Tokens(*columns)


def _packed(batch: dict[str, torch.Tensor], seeds: Sequence[int], noise: IterativeConfig, noise_token: int) -> Layout:
    """M windows of W = block_length tokens per sample: each attends to the clean tokens before it, and causally to
    itself."""
    ids, responses, width = batch["input_ids"], batch["response_mask"].bool(), noise.block_length
    valid = batch["attention_mask"].bool()
    prefix = Tokens(ids, batch["position_ids"], valid, _next_labels(ids, responses))
    starts = _starts(responses.sum(1).tolist(), seeds, noise)
    counts = responses.any(1, keepdim=True)  # False for rows that only fill a validation batch
    first = torch.where(counts, responses.int().argmax(1, keepdim=True), 1)  # [B, 1]: the first response token
    committed = torch.tensor(starts) + first - 1  # [B, M]: column of each window's last committed token
    columns = (committed.unsqueeze(-1) + torch.arange(width)).flatten(1)  # [B, M * W]: column of each tail token
    inside = (columns < valid.sum(1, keepdim=True)) & counts
    known = columns.clamp(max=ids.shape[1] - 1)
    number = torch.arange(columns.shape[1])
    is_first = number % width == 0
    clean = torch.where(inside, ids.gather(1, known), noise_token)
    labels = torch.where(inside, prefix.labels.gather(1, known), IGNORED)
    own = (number[None] // width == number[:, None] // width).tril()  # [M * W, M * W]
    cross = torch.arange(ids.shape[1]) < committed.repeat_interleave(width, 1).unsqueeze(-1)  # [B, M * W, T]
    tail = Tokens(torch.where(is_first, clean, noise_token), batch["position_ids"][:, :1] + columns,
                  torch.ones_like(inside), labels)  # fmt: skip
    region = (~is_first).expand_as(inside)
    attention_mask = torch.cat([cross, own.expand(len(ids), -1, -1)], 2)
    return Layout(prefix, tail, region, clean, attention_mask, int((inside & region).sum()), whole_prefix=True)
