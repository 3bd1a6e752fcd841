"""Runs a batch without padding, optionally with a shared prompt computed once: one flat row of tokens.

Only attention mixes tokens, so everything else runs on the flat row [1, T] directly. transformers calls
`packed_attention` (registered under NAME), which gathers the rows from the flat row and scatters the outputs back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from loguru import logger
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from verl.utils.groupwise import groups_of

NAME = "verl_packed"
Segment = tuple[torch.Tensor, torch.Tensor]
"""Flat positions of consecutive queries [q] and of the keys they attend to [k], int64."""


class Part(NamedTuple):
    """S segments that share one attention call, right-padded; indices are flat positions, padding points to 0."""

    queries: torch.Tensor  # int64 [S, Q]
    keys: torch.Tensor  # int64 [S, K]
    mask: torch.Tensor | None  # bool [S, 1, Q, K], True = attended; None: causal within the segment
    valid: torch.Tensor  # bool [S, Q], True = not padding


@dataclass(frozen=True)
class Packing:
    """A batch [B, L] as one flat row of T tokens, and the positions that predict its N response tokens."""

    tokens: torch.Tensor  # int64 [T]: index of each flat token in the flattened batch [B * L]
    parts: tuple[Part, ...]
    restore: torch.Tensor  # int64 [T]: index of each flat token's output among the S * Q rows of all parts
    predicted_from: torch.Tensor  # int64 [N]: flat position before each attended response token, row by row

    @classmethod
    def of(
        cls, tokens: torch.Tensor, parts: tuple[Part, ...], predicted_from: torch.Tensor, device: torch.device
    ) -> Packing:
        """The packing of these parts, on `device`; `restore` follows from the parts."""
        order = torch.cat([part.queries[part.valid] for part in parts])
        restore = torch.empty_like(order)
        restore[order] = torch.nonzero(torch.cat([part.valid.flatten() for part in parts]))[:, 0]
        parts = tuple(Part(*(None if t is None else t.to(device) for t in part)) for part in parts)
        return cls(tokens.to(device), parts, restore.to(device), predicted_from.to(device))

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """[B, L] -> [1, T]."""
        return values.reshape(-1)[self.tokens].unsqueeze(0)

    def spread(self, states: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        """[1, T, H] -> [rows, width, H], 0 at padding: the inverse of `flat`."""
        empty = states.new_zeros(rows * width, states.shape[-1])
        return empty.index_copy(0, self.tokens, states[0]).view(rows, width, -1)

    def model_inputs(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> dict[str, Any]:
        """Keyword arguments of a packable model's forward for input_ids and position_ids, both int64 [B, L]."""
        # A mask with four dimensions: transformers then builds none of its own.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device)
        return {"input_ids": self.flat(input_ids), "position_ids": self.flat(position_ids), "attention_mask": mask,
                "packing": self, "use_cache": False}  # fmt: skip


def pack(attention_mask: torch.Tensor, responses: int, group_index: torch.Tensor | None = None) -> Packing:
    """The packing of rows [B, P+R] whose last R = `responses` columns are the responses.

    attention_mask: [B, P+R], 1 = token. With group_index [B] (rows of a group adjacent), the prompt of a group's first
    row serves all its rows. Raises ValueError if a row has an empty prompt or a group's rows are not adjacent.
    """
    width = attention_mask.shape[1]
    attended = attention_mask.bool().cpu()
    prompts = [torch.nonzero(row[: width - responses])[:, 0] for row in attended]
    answers = [torch.nonzero(row[width - responses :])[:, 0] + width - responses for row in attended]
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a row of the batch has an empty prompt: nothing predicts its first response token.")
    if group_index is None:
        tokens, segments, before = _separate_rows(prompts, answers, width)
    else:
        groups = groups_of(group_index)
        if group_index.unique().numel() != len(groups):
            raise ValueError(f"group_index {group_index.tolist()} has a group whose rows are not adjacent.")
        tokens, segments, before = _shared_prompts(prompts, answers, width, groups)
    similar: dict[tuple[bool, int], list[Segment]] = {}  # by powers of two of the keys: less padding in a part
    for causal, kind in segments:
        for queries, keys in kind:
            similar.setdefault((causal, (len(keys) - 1).bit_length()), []).append((queries, keys))
    parts = tuple(_part(group, causal) for (causal, _), group in similar.items())
    predicted_from = torch.cat(before) if before else torch.empty(0, dtype=torch.int64)
    return Packing.of(torch.cat(tokens), parts, predicted_from, attention_mask.device)


def pack_rows(attention_mask: torch.Tensor, seen: torch.Tensor | None = None) -> Packing:
    """The packing of rows without responses: nothing is predicted.

    attention_mask: [B, P], 1 = token, contiguous in each row. seen: bool [B, P, P], True where a query (row) attends to
    a key (column); None means causal.
    """
    device, width = attention_mask.device, attention_mask.shape[1]
    rows = [torch.nonzero(row)[:, 0] for row in attention_mask.bool().cpu()]
    tokens, [(_, segments)], _ = _separate_rows(rows, [row[:0] for row in rows], width)
    part = _part(segments, causal=True)
    if seen is not None:
        columns = pad_sequence(rows, batch_first=True).to(device)  # [B, W]
        row = torch.arange(len(rows), device=device)[:, None, None]
        mask = seen[row, columns[:, :, None], columns[:, None, :]].cpu() & part.valid[:, None, :]
        mask |= torch.eye(mask.shape[1], dtype=torch.bool)  # a padding query without any key would give NaN
        part = part._replace(mask=mask.unsqueeze(1))
    return Packing.of(torch.cat(tokens), (part,), torch.empty(0, dtype=torch.int64), device)


Layout = tuple[list[torch.Tensor], list[tuple[bool, list[Segment]]], list[torch.Tensor]]
"""Token indices, segments of each kind (True = causal), and flat positions that predict response tokens."""


def _separate_rows(prompts: list[torch.Tensor], answers: list[torch.Tensor], width: int) -> Layout:
    """One causal segment per row; prompts and answers are column indices of each row's tokens."""
    tokens, rows, before, start = [], [], [], 0
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens.append(torch.cat([prompt, answer]) + i * width)
        positions = torch.arange(start, start + len(tokens[-1]))
        rows.append((positions, positions))
        before.append(positions[len(prompt) - 1 : -1] if len(answer) else positions[:0])
        start += len(positions)
    return tokens, [(True, rows)], before


def _shared_prompts(
    prompts: list[torch.Tensor], answers: list[torch.Tensor], width: int, groups: list[list[int]]
) -> Layout:
    """A causal segment for each group's prompt; its answers attend to the prompt and to themselves."""
    tokens, heads, tails, before, start = [], [], [], [], 0
    for group in groups:
        prompt = prompts[group[0]]
        shared = torch.arange(start, start + len(prompt))
        tokens.append(prompt + group[0] * width)
        heads.append((shared, shared))
        start += len(prompt)
        for i in group:
            own = torch.arange(start, start + len(answers[i]))
            tokens.append(answers[i] + i * width)
            before.append(torch.cat([shared[-1:], own])[: len(own)])
            if len(own):
                tails.append((own, torch.cat([shared, own])))
            start += len(own)
    return tokens, [(True, heads), (False, tails)], before


def _part(segments: list[Segment], causal: bool) -> Part:
    lengths = torch.tensor([[len(queries), len(keys)] for queries, keys in segments])  # [S, 2]
    queries, keys = (pad_sequence(list(column), batch_first=True) for column in zip(*segments, strict=True))
    valid = torch.arange(queries.shape[1]) < lengths[:, :1]
    if causal:  # padding comes after every token that could attend to it
        return Part(queries, keys, None, valid)
    offset = lengths[:, 1:] - lengths[:, :1]  # keys before the first query
    last = (offset + torch.arange(queries.shape[1])).unsqueeze(-1)  # [S, Q, 1]: the key at the query's own position
    seen = torch.arange(keys.shape[1]) <= torch.minimum(last, lengths[:, 1:].unsqueeze(-1) - 1)
    return Part(queries, keys, seen.unsqueeze(1), valid)


def packed_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    packing: Packing | None = None, **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, h, T, D] -> [1, T, H, D].

    Without `packing` it is transformers' own scaled dot-product attention. Raises ValueError for a sliding window
    shorter than the flat row, or a soft cap.
    """
    if packing is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    window, cap = kwargs.get("sliding_window"), kwargs.get("softcap")
    if cap is not None or (window is not None and window < query.shape[2]):
        raise ValueError(
            f"the model's attention has sliding_window={window}, softcap={cap}, which batches without padding do not "
            "support; set actor_rollout_ref.model.use_remove_padding=false and "
            "actor_rollout_ref.actor.share_prompt_forward=false (SFT: use_remove_padding=false, data.packing=false)."
        )
    outputs = []
    for part in packing.parts:
        q, k, v = _rows(query, part.queries), _rows(key, part.keys), _rows(value, part.keys)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=part.mask, is_causal=part.mask is None, scale=scaling, dropout_p=dropout,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        outputs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))  # [S * Q, H * D]
    restored = F.embedding(packing.restore, torch.cat(outputs))
    return restored.view(1, -1, query.shape[1], value.shape[3]), None


def _rows(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """states [1, H, T, D] at flat positions index [S, Q] -> [S, H, Q, D].

    An embedding lookup: the backward pass of plain indexing is many times slower.
    """
    _, heads, tokens, width = states.shape
    flat = states.transpose(1, 2).reshape(tokens, heads * width)
    return F.embedding(index, flat).view(*index.shape, heads, width).transpose(1, 2)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def make_packable(model: PreTrainedModel) -> bool:
    """Switch the model to `packed_attention`; False, with a warning, if its attention cannot be replaced."""
    if model.config._attn_implementation == NAME:
        return True
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        logger.debug("{}", error)
    if model.config._attn_implementation != NAME:
        logger.warning("the attention of {} cannot be replaced: batches keep their padding, and prompts are not shared",
                       type(model).__name__)  # fmt: skip
        return False
    return True
