"""Drafted blocks as input of a judge, and as input [Context] SEP [Draft] SEP [Target] SEP of the scorer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

IDS = ("context_ids", "draft_ids", "target_ids")
SEP_VARIABLE = "SPD_SEP_TOKEN_ID"


@dataclass
class Block:
    """Input of a judge: B drafted blocks of g tokens, and the target's predictions.

    Position i of `target_ids`, `target_logits` and `target_hidden` predicts draft token i from the context and the
    draft tokens before i; position g predicts the bonus token.
    """

    context_ids: list[list[int]]  # B lists: the prompt and the tokens committed so far
    draft_ids: torch.Tensor  # [B, g] int64
    target_ids: torch.Tensor  # [B, g + 1] int64, the target's greedy choices; sampled ones: see Sampling
    target_logits: torch.Tensor  # [B, g + 1, V] float32; V: ids that both models know, however they pad embeddings
    draft_logits: torch.Tensor  # [B, g, V] float32
    target_layers: Sequence[torch.Tensor]  # of [B, g + 1, H]: the target's states before its first layer, after each
    mismatch: torch.Tensor  # [B, g] bool, True where draft and target differ
    rows: torch.Tensor  # [B] int64, the question each row belongs to

    @property
    def target_hidden(self) -> torch.Tensor:
        """[B, g + 1, H], the input of the target's output layer."""
        return self.target_layers[-1]


Judge = Callable[[Block], torch.Tensor]  # Block -> bool [B, g], True = accept; matches are accepted in any case


def build_spd_input(
    context_ids: list[int], draft_ids: list[int], target_ids: list[int], sep_token_id: int
) -> tuple[list[int], dict[str, int]]:
    """The scorer's input ids, and the offsets of its parts in it. Raises ValueError without a bonus token."""
    if error := bonus_error(draft_ids, target_ids):
        raise ValueError(error)
    ids = [*context_ids, sep_token_id, *draft_ids, sep_token_id, *target_ids, sep_token_id]
    draft_start = len(context_ids) + 1
    return ids, {
        "context_len": len(context_ids), "draft_start": draft_start, "draft_len": len(draft_ids),
        "target_start": draft_start + len(draft_ids) + 1, "target_len": len(target_ids),
    }  # fmt: skip


def bonus_error(draft_ids: Sequence[int], target_ids: Sequence[int]) -> str:
    """The error if the target does not have one id more than the draft; empty if it has."""
    if len(target_ids) == len(draft_ids) + 1:
        return ""
    return f"{len(target_ids)} target_ids for {len(draft_ids)} draft_ids; one more (the bonus token) is needed."


def cut_at_end(draft: list[int], target: list[int], ends: frozenset[int]) -> tuple[list[int], list[int]]:
    """Drop the draft tokens after its end token, which are never used."""
    end = next((i for i, token in enumerate(draft) if token in ends), None)
    return (draft, target) if end is None else (draft[: end + 1], target[: end + 2])


def mismatches(draft_ids: Sequence[int], target_ids: Sequence[int]) -> list[int]:
    """The positions of the draft at which the target chose another token."""
    return [i for i, (drafted, chosen) in enumerate(zip(draft_ids, target_ids, strict=False)) if drafted != chosen]


def left_padded_layout(offsets: Mapping[str, int], padding: int) -> list[int]:
    """spd_layout: context_start, context_len, draft_start, draft_len, target_start after `padding` columns in front.

    The context ends before the first separator, also after a cut.
    """
    draft_start = offsets["draft_start"] + padding
    context_start = draft_start - 1 - offsets["context_len"]
    return [context_start, offsets["context_len"], draft_start, offsets["draft_len"], offsets["target_start"] + padding]


@dataclass
class SPDInputData:
    """Input batch of the scorer; all tensors have the same first dimension."""

    input_ids: torch.Tensor  # [B, P] int64, left-padded
    attention_mask: torch.Tensor  # [B, P], 1 = text
    position_ids: torch.Tensor  # [B, P], counted from the context's first token, 0 at padding
    spd_layout: torch.Tensor  # [B, 5] = context_start, context_len, draft_start, draft_len, target_start

    @classmethod
    def from_blocks(
        cls, contexts: Sequence[list[int]], drafts: Sequence[list[int]], targets: Sequence[list[int]], *,
        sep_token_id: int, pad_token_id: int, device: torch.device | str = "cpu",
    ) -> SPDInputData:  # fmt: skip
        """Blocks as ids (each target one longer than its draft), left-padded to the longest."""
        built = [build_spd_input(c, d, t, sep_token_id) for c, d, t in zip(contexts, drafts, targets, strict=True)]
        width = max(len(ids) for ids, _ in built)
        texts = [[pad_token_id] * (width - len(ids)) + ids for ids, _ in built]
        layout = [left_padded_layout(offsets, width - len(ids)) for ids, offsets in built]
        layout = torch.tensor(layout, device=device)
        positions = torch.arange(width, device=device) - layout[:, :1]
        return cls(torch.tensor(texts, device=device), (positions >= 0).long(), positions.clamp(min=0), layout)

    def as_kwargs(self) -> dict[str, torch.Tensor]:
        """The keyword arguments of ScoringActor.forward."""
        return dict(vars(self))


def resolve_sep_token_id(tokenizer: Any, read: bool = True) -> int:
    """SPD_SEP_TOKEN_ID, else the tokenizer's sep token, else its first reserved special token; else an error.

    Without `read` (a `target` head, which sees no separator) the pad or end token does, instead of the error.
    """
    if SEP_VARIABLE in os.environ:
        text = os.environ[SEP_VARIABLE]
        if not text.isdecimal() or int(text) >= len(tokenizer):
            raise ValueError(f"{SEP_VARIABLE}={text!r} is not a token id below {len(tokenizer)}, the tokenizer's size.")
        return int(text)
    if tokenizer.sep_token_id is not None:
        return tokenizer.sep_token_id
    reserved = sorted(i for i, token in tokenizer.added_tokens_decoder.items() if "reserved" in token.content.lower())
    if reserved:
        return reserved[0]
    if not read:
        return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    raise ValueError(
        "an own backbone reads a separator, but the tokenizer has neither a sep nor a reserved special token: set "
        f"{SEP_VARIABLE} to a token id that never occurs in text, or use spd.backbone=target."
    )
