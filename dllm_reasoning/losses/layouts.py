"""Lays a micro-batch out as a clean prefix and a noised tail that looks at it.

`rows`: the tail is the whole sample (plain, as SFT sees it), or, split, [last instruction token, response] behind the
instruction. `packed`: the prefix is the whole clean sample, the tail is windows [last committed token, noise, ...].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from dllm_reasoning.utils.noise_utils import PATTERNS, noise_level, q_sample, row_generator, window_starts

IGNORED = -100


@dataclass
class Tokens:
    """One stream of a micro-batch, [B, N] each: ids, positions and valid (1 = no padding); labels [B, N] are what the
    model should say at each place, IGNORED where nothing counts."""

    ids: torch.Tensor
    positions: torch.Tensor
    valid: torch.Tensor
    labels: torch.Tensor

    def count(self) -> int:
        """Places that count."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device | str) -> Tokens:
        return Tokens(*(getattr(self, name).to(device) for name in ("ids", "positions", "valid", "labels")))


@dataclass
class Layout:
    """`tail` is decoded anew at `region` [B, Q] bool between rounds; it sees `seen` [B, Q, P + Q] bool of prefix and
    itself. Without a prefix the tail is causal over its valid tokens. `clean` [B, Q]: the tail's ids without noise;
    `noised`: number of noise tokens at places that exist; `whole_prefix`: it is the clean sample, with a loss of its
    own."""

    prefix: Tokens | None
    tail: Tokens
    region: torch.Tensor
    clean: torch.Tensor
    seen: torch.Tensor | None
    noised: int
    whole_prefix: bool = False

    def to(self, device: torch.device | str) -> Layout:
        moved = {name: getattr(self, name) for name in ("prefix", "tail", "region", "clean", "seen")}
        return replace(self, **{name: None if part is None else part.to(device) for name, part in moved.items()})


@dataclass(frozen=True)
class NoiseSettings:
    """What a layout needs to know of the config; `width` is W, `token` the noise token's id, `aligned` the share of
    the windows that begin at a multiple of W."""

    pattern: str
    schedule: str
    low: float
    high: float
    width: int
    windows: int
    aligned: float
    token: int

    def starts(self, length: int, seed: int) -> list[int]:
        """Where the windows of one response begin."""
        return window_starts(length, self.windows, row_generator(seed), width=self.width, aligned=self.aligned)


def build_layout(
    batch: dict[str, torch.Tensor], seeds: Sequence[int], noise: NoiseSettings, *, progress: float, split: bool
) -> Layout:
    """The layout of right-padded rows: input_ids, attention_mask, position_ids, response_mask, [B, T] each (CPU).

    `seeds`: one a row. `split`: keep the instruction apart, so that rounds can share it (packed always does).
    """
    if PATTERNS[noise.pattern].windows:
        return _packed(batch, seeds, noise)
    noised, region = _noise_of_rows(batch, seeds, noise, progress)
    ids, answers = batch["input_ids"], batch["response_mask"].bool()
    tail = Tokens(
        q_sample(ids, answers, noised, noise.token), batch["position_ids"], batch["attention_mask"].bool(),
        _next_labels(ids, answers),
    )  # fmt: skip
    whole = Layout(None, tail, region, ids, None, int(noised.sum()))
    return _split(whole, answers) if split else whole


def count_labels(batch: dict[str, torch.Tensor], seeds: Sequence[int], noise: NoiseSettings) -> int:
    """Places that a round's loss counts in the layouts of these rows, without making them."""
    lengths = batch["response_mask"].sum(1).tolist()
    if not PATTERNS[noise.pattern].windows:
        return sum(lengths)
    starts = (noise.starts(n, seed) for n, seed in zip(lengths, seeds, strict=True))
    return sum(min(noise.width, n - start) for n, drawn in zip(lengths, starts, strict=True) for start in drawn)


def _next_labels(ids: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Each place's next token where that is a response token. [B, T] -> [B, T]."""
    labels = torch.full_like(ids, IGNORED)
    labels[:, :-1] = torch.where(answers[:, 1:], ids[:, 1:], IGNORED)
    return labels


def _noise_of_rows(
    batch: dict[str, torch.Tensor], seeds: Sequence[int], noise: NoiseSettings, progress: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(noised, region), bool [B, T], each row from its own seed."""
    answers = batch["response_mask"].bool()
    noised, region = torch.zeros_like(answers), torch.zeros_like(answers)
    places = PATTERNS[noise.pattern].places
    for i, seed in enumerate(seeds):
        generator = row_generator(seed)
        level = noise_level(noise.schedule, noise.low, noise.high, progress, generator)
        drawn = places(int(answers[i].sum()), level, noise.width, generator)
        noised[i, answers[i]], region[i, answers[i]] = drawn
    return noised, region


def _split(whole: Layout, answers: torch.Tensor) -> Layout:
    """Instructions less their last token as prefix, the rest as tail; both right-padded anew."""
    ends = whole.tail.valid.sum(1)
    starts = torch.where(answers.any(1), answers.int().argmax(1), ends - 1)  # [B]: the first response token
    tail_of = [slice(int(s) - 1, int(e) - 1) for s, e in zip(starts, ends, strict=True)]  # EOS is never an input
    head_of = [slice(0, int(s) - 1) for s in starts]
    prefix, tail = _cut(whole.tail, head_of), _cut(whole.tail, tail_of)
    own = _causal(tail.valid)
    cross = prefix.valid.unsqueeze(1).expand(-1, tail.ids.shape[1], -1)
    region, clean = (pad_sequence([t[i, s] for i, s in enumerate(tail_of)], batch_first=True)
                     for t in (whole.region, whole.clean))  # fmt: skip
    return replace(whole, prefix=prefix, tail=tail, region=region, clean=clean, seen=torch.cat([cross, own], 2))


def _cut(tokens: Tokens, slices: list[slice]) -> Tokens:
    """At least one column: where every instruction is one token, the prefix is a padding token that nothing sees, so
    that each rank makes the same forwards."""
    found = []
    columns = (tokens.ids, tokens.positions, tokens.valid, tokens.labels)
    for column, value in zip(columns, (0, 0, False, IGNORED), strict=True):
        rows = [column[i, s] for i, s in enumerate(slices)]
        cut = pad_sequence(rows, batch_first=True, padding_value=value)
        found.append(cut if cut.shape[1] else pad(cut, (0, 1), value=value))
    return Tokens(*found)


def _causal(valid: torch.Tensor) -> torch.Tensor:
    """[B, N] -> [B, N, N] bool: itself and valid places before it."""
    n = valid.shape[1]
    lower = torch.ones(n, n, dtype=torch.bool, device=valid.device).tril()
    return lower & valid.unsqueeze(1) | torch.eye(n, dtype=torch.bool, device=valid.device)


def _packed(batch: dict[str, torch.Tensor], seeds: Sequence[int], noise: NoiseSettings) -> Layout:
    """Windows of `width` tokens, `windows` a sample: each sees the clean tokens before it, and itself causally."""
    ids, answers, width = batch["input_ids"], batch["response_mask"].bool(), noise.width
    valid = batch["attention_mask"].bool()
    prefix = Tokens(ids, batch["position_ids"], valid, _next_labels(ids, answers))
    drawn = [noise.starts(int(row.sum()), seed) for row, seed in zip(answers, seeds, strict=True)]
    counts = answers.any(1, keepdim=True)  # a row without a response fills a batch of validation up
    first = torch.where(counts, answers.int().argmax(1, keepdim=True), 1)  # [B, 1]
    committed = torch.tensor(drawn) + first - 1  # [B, M]: place of each window's last committed token
    places = (committed.unsqueeze(-1) + torch.arange(width)).flatten(1)  # [B, M * W]: place that each tail token takes
    inside = (places < valid.sum(1, keepdim=True)) & counts
    known = places.clamp(max=ids.shape[1] - 1)
    is_first = torch.arange(places.shape[1]) % width == 0
    clean = torch.where(inside, ids.gather(1, known), noise.token)
    labels = torch.where(inside, prefix.labels.gather(1, known), IGNORED)
    window = torch.arange(places.shape[1]) // width
    own = (window.unsqueeze(0) == window.unsqueeze(1)).tril()  # [M * W, M * W]
    cross = torch.arange(ids.shape[1]) < committed.repeat_interleave(width, 1).unsqueeze(-1)  # [B, M * W, T]
    tail = Tokens(torch.where(is_first, clean, noise.token), batch["position_ids"][:, :1] + places,
                  torch.ones_like(inside), labels)  # fmt: skip
    region = (~is_first).expand_as(inside)
    seen = torch.cat([cross, own.expand(len(ids), -1, -1)], 2)
    return Layout(prefix, tail, region, clean, seen, int((inside & region).sum()), whole_prefix=True)
