"""Runs a batch without its padding, and the prompt that several rows share once: one flat row of tokens.

Everything but attention works on single tokens, so that a flat row of T tokens costs what its tokens cost. Attention is
taken by `packed_attention`, which transformers calls by the name below; rows are cut out of the flat row and put back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from loguru import logger
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from verl.utils.groupwise import groups_of

NAME = "verl_packed"
Segment = tuple[torch.Tensor, torch.Tensor]  # places of queries that follow each other, and of the keys they look at


@dataclass(frozen=True)
class Part:
    """S queries' rows of one kind, right-padded: places in the flat row; padding points to place 0."""

    queries: torch.Tensor  # int64 [S, Q]
    keys: torch.Tensor  # int64 [S, K]
    mask: torch.Tensor | None  # bool [S, 1, Q, K]; None: causal over the row itself
    valid: torch.Tensor  # bool [S, Q]: no padding


@dataclass(frozen=True)
class Packing:
    """A batch [B, P+R] as one flat row of T tokens, and what the response tokens are predicted from."""

    tokens: torch.Tensor  # int64 [T]: place of each flat token in the batch, counted through its rows
    parts: tuple[Part, ...]
    restore: torch.Tensor  # int64 [T]: where each flat token's output stands among the S * Q places of all parts
    predicted_from: torch.Tensor  # int64 [N]: flat place in front of each attended response token, row by row

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """[B, P+R] -> [1, T]."""
        return values.reshape(-1)[self.tokens].unsqueeze(0)

    def spread(self, states: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        """[1, T, H] -> [rows, width, H], 0 at padding: the way back of `flat`."""
        empty = states.new_zeros(rows * width, states.shape[-1])
        return empty.index_copy(0, self.tokens, states[0]).view(rows, width, -1)


def pack(attention_mask: torch.Tensor, responses: int, group_index: torch.Tensor | None = None) -> Packing:
    """The packing of rows whose last `responses` columns are the answers. attention_mask [B, P+R].

    With `group_index` [B] (rows of one group adjacent) the prompt of a group's first row stands for all of its rows.
    Raises ValueError where a row has an empty prompt.
    """
    device, width = attention_mask.device, attention_mask.shape[1]
    attended = attention_mask.bool().cpu()
    prompts = [torch.nonzero(row[: width - responses])[:, 0] for row in attended]
    answers = [torch.nonzero(row[width - responses :])[:, 0] + width - responses for row in attended]
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a row of the batch has an empty prompt: nothing predicts its first answer token.")
    layout = _shared(prompts, answers, width, _groups(group_index)) if group_index is not None else (
        _single(prompts, answers, width)
    )  # fmt: skip
    tokens, segments, before = layout
    parts = tuple(_part(alike, causal) for causal, kind in segments for alike in _of_like_length(kind))
    predicted = torch.cat(before) if before else torch.empty(0, dtype=torch.int64)
    return _packing(torch.cat(tokens), parts, predicted, device)


def pack_rows(attention_mask: torch.Tensor, seen: torch.Tensor | None = None) -> Packing:
    """The packing of whole rows without answers; nothing is predicted. attention_mask [B, P], its ones side by side.

    seen: bool [B, P, P], which key each query looks at; None: causal.
    """
    device, width = attention_mask.device, attention_mask.shape[1]
    rows = [torch.nonzero(row)[:, 0] for row in attention_mask.bool().cpu()]
    ends = torch.tensor([len(row) for row in rows]).cumsum(0)
    places = [torch.arange(int(end) - len(row), int(end)) for row, end in zip(rows, ends, strict=True)]
    part = _part([(place, place) for place in places], causal=True)
    if seen is not None:
        columns = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)  # [B, W]
        row = torch.arange(len(rows), device=device)[:, None, None]
        mask = seen[row, columns[:, :, None], columns[:, None, :]].cpu() & part.valid[:, None, :]
        mask |= torch.eye(mask.shape[1], dtype=torch.bool)  # padding sees itself: a query that sees nothing is NaN
        part = Part(part.queries, part.keys, mask.unsqueeze(1), part.valid)
    tokens = torch.cat([row + i * width for i, row in enumerate(rows)])
    return _packing(tokens, (part,), torch.empty(0, dtype=torch.int64), device)


def _packing(tokens: torch.Tensor, parts: tuple[Part, ...], predicted: torch.Tensor, device: torch.device) -> Packing:
    order = torch.cat([part.queries[part.valid] for part in parts])
    restore = torch.empty_like(order)
    restore[order] = torch.nonzero(torch.cat([part.valid.flatten() for part in parts]))[:, 0]
    moved = tuple(
        Part(*(None if t is None else t.to(device) for t in (p.queries, p.keys, p.mask, p.valid))) for p in parts
    )
    return Packing(tokens.to(device), moved, restore.to(device), predicted.to(device))


def _groups(group_index: torch.Tensor) -> list[list[int]]:
    groups = groups_of(group_index)
    if group_index.unique().numel() != len(groups):
        raise ValueError(f"group_index {group_index.tolist()} has a group whose rows are not side by side.")
    return groups


def _single(prompts: list, answers: list, width: int) -> tuple[list, list, list]:
    """Each row by itself: one causal segment a row."""
    tokens, rows, before, start = [], [], [], 0
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens.append(torch.cat([prompt, answer]) + i * width)
        places = torch.arange(start, start + len(tokens[-1]))
        rows.append((places, places))
        before.append(places[len(prompt) - 1 : -1] if len(answer) else places[:0])
        start += len(places)
    return tokens, [(True, rows)], before


def _shared(prompts: list, answers: list, width: int, groups: list[list[int]]) -> tuple[list, list, list]:
    """A causal segment for each group's prompt; its answers look at the prompt and at themselves."""
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


def _of_like_length(segments: list[Segment]) -> list[list[Segment]]:
    """By powers of two of their keys: padded to the longest of all, short ones would cost what long ones do."""
    found: dict[int, list[Segment]] = {}
    for queries, keys in segments:
        found.setdefault((len(keys) - 1).bit_length(), []).append((queries, keys))
    return list(found.values())


def _part(segments: list[Segment], causal: bool) -> Part:
    pad = torch.nn.utils.rnn.pad_sequence
    lengths = torch.tensor([[len(queries), len(keys)] for queries, keys in segments])  # [S, 2]
    queries = pad([q for q, _ in segments], batch_first=True)
    keys = pad([k for _, k in segments], batch_first=True)
    valid = torch.arange(queries.shape[1]) < lengths[:, :1]
    if causal:  # padding lies behind every token that could look at it
        return Part(queries, keys, None, valid)
    offset = lengths[:, 1:] - lengths[:, :1]  # keys in front of the first query
    last = (offset + torch.arange(queries.shape[1])).unsqueeze(-1)  # [S, Q, 1]: the key that a query stands on
    seen = torch.arange(keys.shape[1]) <= torch.minimum(last, lengths[:, 1:].unsqueeze(-1) - 1)
    return Part(queries, keys, seen.unsqueeze(1), valid)


def packed_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    packing: Packing | None = None, **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention call: query [1, H, T, D], key and value [1, h, T, D] -> [1, T, H, D].

    Without `packing` it is transformers' own scaled dot-product attention.
    """
    if packing is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    _refuse_what_is_not_plain(kwargs, query.shape[2])
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for part in packing.parts:
        q = _rows(query, part.queries)  # [S, H, Q, D]
        k, v = (_rows(states, part.keys) for states in (key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=part.mask, is_causal=part.mask is None, scale=scaling, dropout_p=dropout,
            enable_gqa=grouped,
        )  # fmt: skip
        outputs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))  # [S * Q, H * D]
    back = F.embedding(packing.restore, torch.cat(outputs))
    return back.view(1, -1, query.shape[1], value.shape[3]), None


def _rows(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[1, H, T, D] at places [S, Q] -> [S, H, Q, D]; an embedding: the backward of indexing is many times as slow."""
    _, heads, tokens, width = states.shape
    flat = states.transpose(1, 2).reshape(tokens, heads * width)
    return F.embedding(places, flat).view(*places.shape, heads, width).transpose(1, 2)


def _refuse_what_is_not_plain(options: dict, tokens: int) -> None:
    window, cap = options.get("sliding_window"), options.get("softcap")
    if cap is not None or (window is not None and window < tokens):
        raise ValueError(
            f"the model's attention has sliding_window={window}, softcap={cap}, which a batch without padding does not "
            "know; set actor_rollout_ref.model.use_remove_padding=false and "
            "actor_rollout_ref.actor.share_prompt_forward=false (SFT: use_remove_padding=false, data.packing=false)."
        )


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def whole_mask(device: torch.device) -> torch.Tensor:
    """The attention_mask of a flat row: with four dimensions, transformers makes none of its own."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def make_packable(model: PreTrainedModel) -> bool:
    """Let the model call `packed_attention`; False, with a warning, where its attention is not transformers' own."""
    if model.config._attn_implementation == NAME:
        return True
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        logger.debug("{}", error)
    if model.config._attn_implementation != NAME:
        logger.warning(
            "{}'s attention cannot be exchanged: batches keep their padding, and prompts are not shared",
            type(model).__name__,
        )
        return False
    return True
