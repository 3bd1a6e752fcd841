"""Position ids and 4-D attention masks of the scorer's input [Context] SEP [Draft] SEP [Target] SEP.

Every function takes attention_mask [B, P] (1 = text) and spd_layout [B, 5] int64 =
(context_start, context_len, draft_start, draft_len, target_start) in columns of the padded input.
"""

import torch
from torch import nn


def create_position_ids(
    attention_mask: torch.Tensor, spd_layout: torch.Tensor, attention: str = "causal"
) -> torch.Tensor:
    """[B, P] int64, 0 at padding. `causal` counts columns from the context's first token. `spd` and `hybrid`: the
    first separator has position len(context), d_i and t_i share len(context) + i; the second separator has the
    bonus token's position and the third the one after it.
    """
    parts = _Parts(attention_mask, spd_layout)
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
    parts = _Parts(attention_mask, spd_layout)
    up_to = parts.number[:, None, :] <= parts.number[:, :, None]
    seen = parts.draft[:, :, None] & parts.draft[:, None, :] & up_to
    seen |= parts.target[:, :, None] & (parts.draft | parts.target)[:, None, :] & up_to
    return parts.additive_mask(seen, dtype)


def create_hybrid_attention_mask(
    attention_mask: torch.Tensor, spd_layout: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[B, 1, P, P] additive: 0 = visible, the dtype's minimum = hidden. The context is causal; draft and target tokens
    see the context and all of each other: the full block is known when it is judged.
    """
    parts = _Parts(attention_mask, spd_layout)
    block = parts.draft | parts.target
    return parts.additive_mask(block[:, :, None] & block[:, None, :], dtype)


class _Parts:
    """Which column belongs to which part of the input, each [B, P] bool: text, prefix (context and first separator),
    draft, target, separator (the second or third); int64: offset (column less context_start), number (i of d_i and t_i,
    from 1, elsewhere 0).
    """

    def __init__(self, attention_mask: torch.Tensor, spd_layout: torch.Tensor) -> None:
        start, context_len, draft_start, draft_len, target_start = spd_layout.unsqueeze(-1).unbind(1)  # [B, 1]
        column = torch.arange(attention_mask.shape[1], device=attention_mask.device)[None, :]
        self.offset = column - start
        self.text = attention_mask.bool()
        self.prefix = (column >= start) & (column <= start + context_len) & self.text
        self.draft = (column >= draft_start) & (column < draft_start + draft_len)
        self.target = (column >= target_start) & (column < target_start + draft_len + 1)
        self.separator = self.text & ~(self.prefix | self.draft | self.target)
        in_target = torch.where(self.target, column - target_start + 1, 0)
        self.number = torch.where(self.draft, column - draft_start + 1, in_target)

    def additive_mask(self, seen_in_block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[B, 1, P, P] from what draft and target see of each other (bool [B, P, P]), completed by what both masks
        allow: the context is causal, the block sees the context, separators see what is before them.
        """
        before = self.offset[:, None, :] < self.offset[:, :, None]
        block, prefix_keys = self.draft | self.target, self.prefix[:, None, :]
        allowed = seen_in_block | (block[:, :, None] & prefix_keys) | (self.prefix[:, :, None] & prefix_keys & before)
        # The second and third separator see everything before them except each other: nothing sees them.
        allowed |= self.separator[:, :, None] & (self.text & ~self.separator)[:, None, :] & before
        # Every token sees itself, padding too: a row without visible tokens would be NaN.
        allowed |= torch.eye(allowed.shape[1], dtype=torch.bool, device=allowed.device)
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


MASKS = {"spd": create_spd_attention_mask, "hybrid": create_hybrid_attention_mask}
"""Of each attention other than causal."""


def refuse_other_attention(model: nn.Module, length: int) -> None:
    """Raise ValueError where some layer of the model would not attend to all of `length` tokens."""
    config = model.config.get_text_config().to_dict()
    usual = "sliding_attention" if config.get("sliding_window") else "full_attention"
    kinds = set(config.get("layer_types") or [usual])
    if odd := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{type(model).__name__} has layers of {', '.join(sorted(odd))}; the decoder needs full attention, take "
            "another model"
        )
    if "sliding_attention" in kinds and length > config["sliding_window"]:
        raise ValueError(
            f"{type(model).__name__} attends to a sliding window of {config['sliding_window']} tokens; a prompt and "
            f"its answer of {length} tokens exceed it: shorten the prompt, or lower max_new_tokens, in training "
            "spd.rollout.rounds"
        )


def sees_everything(model: nn.Module, length: int) -> bool:
    """Whether every layer takes a mask [1, 1, length, length] and attends to all that it leaves visible."""
    try:
        refuse_other_attention(model, length)
    except ValueError:
        return False
    return model.config.get_text_config()._attn_implementation in ("eager", "sdpa")
