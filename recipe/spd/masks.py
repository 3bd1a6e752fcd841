"""Position ids and 4-D attention masks of the scorer's input [Context] SEP [Draft] SEP [Target] SEP.

Every function takes attention_mask [B, P] (1 = text) and spd_layout [B, 5] int64 =
(context_start, context_len, draft_start, draft_len, target_start) in columns of the padded input.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Parts:
    """Which column belongs to which part of the input; every field is [B, P]."""

    offset: torch.Tensor  # int64: column less context_start
    text: torch.Tensor  # bool: not padding
    prefix: torch.Tensor  # bool: context or first separator
    draft: torch.Tensor  # bool
    target: torch.Tensor  # bool
    separator: torch.Tensor  # bool: the second or third separator
    number: torch.Tensor  # int64: i of d_i and t_i (from 1), elsewhere 0


def _parts(attention_mask: torch.Tensor, spd_layout: torch.Tensor) -> _Parts:
    start, context_len, draft_start, draft_len, target_start = (spd_layout[:, i : i + 1] for i in range(5))  # [B, 1]
    column = torch.arange(attention_mask.shape[1], device=attention_mask.device)[None, :]
    text = attention_mask.bool()
    prefix = (column >= start) & (column <= start + context_len) & text
    draft = (column >= draft_start) & (column < draft_start + draft_len)
    target = (column >= target_start) & (column < target_start + draft_len + 1)
    number = torch.where(draft, column - draft_start + 1, torch.where(target, column - target_start + 1, 0))
    return _Parts(column - start, text, prefix, draft, target, text & ~(prefix | draft | target), number)


def create_position_ids(
    attention_mask: torch.Tensor, spd_layout: torch.Tensor, attention: str = "causal"
) -> torch.Tensor:
    """[B, P] int64, 0 at padding. `causal` counts columns from the context's first token. `spd` and `hybrid`: the
    first separator has position len(context), d_i and t_i share len(context) + i; the second separator has the
    bonus token's position and the third the one after it.
    """
    parts = _parts(attention_mask, spd_layout)
    if attention == "causal":
        return torch.where(parts.text, parts.offset, 0)
    context_len, draft_len, target_start = spd_layout[:, 1:2], spd_layout[:, 3:4], spd_layout[:, 4:5]
    after_target = parts.offset + spd_layout[:, 0:1] > target_start
    separator = context_len + draft_len + 1 + after_target.long()
    inside = torch.where(parts.number > 0, context_len + parts.number, torch.where(parts.prefix, parts.offset, 0))
    return torch.where(parts.separator, separator, inside)


def create_spd_attention_mask(
    attention_mask: torch.Tensor, spd_layout: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[B, 1, P, P] additive: 0 = visible, the dtype's minimum = hidden. t_i sees the context, d_1..d_i and
    t_1..t_i; the context and the draft are causal, and the draft sees the context.
    """
    parts = _parts(attention_mask, spd_layout)
    allowed = _shared(parts)
    q_number, k_number = parts.number[:, :, None], parts.number[:, None, :]
    up_to = k_number <= q_number
    allowed |= parts.draft[:, :, None] & parts.draft[:, None, :] & up_to
    allowed |= parts.target[:, :, None] & (parts.draft | parts.target)[:, None, :] & up_to
    return _additive(allowed, dtype)


def create_hybrid_attention_mask(
    attention_mask: torch.Tensor, spd_layout: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[B, 1, P, P] additive: 0 = visible, the dtype's minimum = hidden. The context is causal; draft and target tokens
    see the context and all of each other: the full block is known when it is judged.
    """
    parts = _parts(attention_mask, spd_layout)
    block = parts.draft | parts.target
    return _additive(_shared(parts) | (block[:, :, None] & block[:, None, :]), dtype)


def _shared(parts: _Parts) -> torch.Tensor:
    """[B, P, P] bool, what both masks allow: causal context, the block sees the context, separators see back."""
    offset = parts.offset
    before = offset[:, None, :] < offset[:, :, None]
    prefix_keys = parts.prefix[:, None, :]
    allowed = parts.prefix[:, :, None] & prefix_keys & before
    allowed |= (parts.draft | parts.target)[:, :, None] & prefix_keys
    # The second and third separator see everything before them except each other: nothing sees them.
    allowed |= parts.separator[:, :, None] & (parts.text & ~parts.separator)[:, None, :] & before
    # Every token sees itself, padding too: a row without visible tokens would be NaN.
    return allowed | torch.eye(offset.shape[1], dtype=torch.bool, device=offset.device)


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, P, P] bool -> [B, 1, P, P] of `dtype`."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]
