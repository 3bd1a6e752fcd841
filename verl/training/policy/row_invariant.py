"""A forward in which a token's result does not depend, in any bit, on the tokens computed with it or on a cache.

Kernels choose the order of their sums by the shapes of their inputs: for one token after a cache another than for a
whole sequence. Here matrix products take blocks of ROWS rows, and attention reads its keys in blocks of KEYS from the
start of each sequence, for QUERIES rows at a time, whatever the batch: shorter blocks are padded. A row's sums then
have one order. Only forwards do; backward passes are the usual ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import flash_attention_mask

from verl.training.policy.packing import Packing

NAME = "verl_row_invariant"  # of the attention
ROWS, QUERIES, KEYS = 32, 16, 128
CANNOT = "actor.batch_invariant=true with rollout.name=hf in float32 cannot compute in a fixed order"
REMEDY = "Set actor_rollout_ref.actor.batch_invariant=false, or another actor_rollout_ref.rollout.name."


def row_product(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """rows [N, K] times the transpose of weight [V, K] -> [N, V], in `out` if given."""
    out = rows.new_empty(len(rows), len(weight)) if out is None else out
    whole = len(rows) - len(rows) % ROWS
    for start in range(0, whole, ROWS):
        torch.mm(rows[start : start + ROWS], weight.T, out=out[start : start + ROWS])
    if rest := len(rows) - whole:
        out[whole:] = torch.mm(F.pad(rows[whole:], (0, 0, 0, ROWS - rest)), weight.T)[:rest]
    return out


class RowInvariantLinear(nn.Linear):
    """nn.Linear by `row_product`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _Linear.apply(input, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        product = row_product(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], len(weight))
        return product if bias is None else product.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight), (of_x, of_weight, of_bias) = ctx.saved_tensors, ctx.needs_input_grad
        gradient = gradients[0].flatten(0, -2)
        return (
            (gradient @ weight).view(x.shape) if of_x else None,
            gradient.T @ x.flatten(0, -2) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


class _GradientOf(torch.autograd.Function):
    """compute(*tensors), with the gradient of usual(*tensors), which is equal up to rounding."""

    @staticmethod
    def forward(ctx: Any, compute: Callable, usual: Callable, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.usual = usual
        ctx.save_for_backward(*tensors)
        return compute(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.usual(*inputs)
        return None, None, *torch.autograd.grad(output, inputs, gradients)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def _gelu_of_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


# PyTorch's own kernels round the last elements of a tensor in another way than the others; exp, erf and tanh do not.
ACTIVATIONS = {
    "SiLU": _silu, "SiLUActivation": _silu, "GELUActivation": _gelu, "GELUTanh": _gelu_of_tanh,
    "NewGELUActivation": _gelu_of_tanh,
}  # fmt: skip
EXACT = ("ReLU", "ReLUSquaredActivation", "Dropout", "Identity")


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, scale: float
) -> torch.Tensor:  # fmt: skip
    """Causal attention of the last Q positions of K: query [B, H, Q, D], key and value [B, h, K, D] -> [B, H, Q, D].

    starts: int64 [B], the first key of each row; queries before it get zeros.
    """
    (batch, heads, queries, _), (_, shared, keys, _) = query.shape, key.shape
    groups, padded = heads // shared, -(-keys // KEYS) * KEYS
    if bool(starts.any()):  # the blocks of keys begin at the first one
        index = (starts[:, None] + torch.arange(keys, device=key.device)).clamp(max=keys - 1)[:, None, :, None]
        key, value = (x.gather(2, index.expand_as(x)) for x in (key, value))
    key, value = (F.pad(x, (0, 0, 0, padded - keys)).flatten(0, 1) for x in (key, value))  # [B * h, ., .]
    places = keys - queries + torch.arange(queries, device=key.device) - starts[:, None]  # [B, Q], of a query's own key
    # A row is a query head at a position; the heads that read the same keys follow one another.
    rows = query.unflatten(1, (shared, groups)).transpose(2, 3).flatten(2, 3).flatten(0, 1)  # [B * h, Q * groups, D]
    more = -rows.shape[1] % QUERIES
    rows = F.pad(rows, (0, 0, 0, more)).unflatten(1, (-1, QUERIES)) * scale  # [B * h, n, QUERIES, D]
    places = F.pad(places.repeat_interleave(groups, 1), (0, more), value=-1).unflatten(1, (-1, QUERIES))
    places = places.repeat_interleave(shared, 0)[..., None]  # [B * h, n, QUERIES, 1]
    most = places.new_full(places.shape, -math.inf, dtype=rows.dtype)
    total, output = torch.zeros_like(most), rows.new_zeros(*rows.shape[:-1], value.shape[-1])
    last = places.amax((0, 2, 3))  # [n], the last key that a block of queries attends to
    for start in range(0, padded, KEYS):
        reaching = (last >= start).nonzero()
        if len(reaching) == 0:
            break
        at = slice(int(reaching[0]), None)  # blocks before would change nothing
        some = rows[:, at]
        count = some.shape[1]

        def times(x: torch.Tensor, block: torch.Tensor, count: int = count) -> torch.Tensor:
            repeated = block[:, None].expand(-1, count, -1, -1).flatten(0, 1)
            return torch.bmm(x.flatten(0, 1), repeated).view(*x.shape[:-1], -1)

        scores = times(some, key[:, start : start + KEYS].transpose(1, 2))
        column = start + torch.arange(KEYS, device=key.device)
        scores = scores.masked_fill_(column > places[:, at], -math.inf)
        before = most[:, at]
        now = torch.maximum(before, scores.amax(-1, keepdim=True))
        finite = now.masked_fill(now == -math.inf, 0.0)
        weights, kept = scores.sub_(finite).exp_(), (before - finite).exp_()
        total[:, at] = total[:, at] * kept + weights.sum(-1, keepdim=True)
        output[:, at] = output[:, at] * kept + times(weights, value[:, start : start + KEYS])
        most[:, at] = now
    output = output / total.masked_fill(total == 0, 1.0)
    output = output.flatten(1, 2)[:, : queries * groups].view(batch, shared, queries, groups, -1)
    return output.transpose(2, 3).reshape(batch, heads, queries, -1)


def _usual_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, scale: float
) -> torch.Tensor:  # fmt: skip
    """What `attend` computes, by PyTorch's kernel; a query before the first key gets its own value."""
    column = torch.arange(key.shape[2], device=key.device)
    own = column[key.shape[2] - query.shape[2] :, None]
    seen = (column <= own) & ((column >= starts[:, None, None]) | (column == own))  # [B, Q, K]
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, seen[:, None], scale=scale, enable_gqa=grouped)


def attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    packing: Packing | None = None, **kwargs,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' attention interface: query [B, H, Q, D], key and value [B, h, K, D] -> [B, Q, H, D].

    attention_mask: [B, K], 0 at the padding before a row; None: no padding. With a `packing` B is 1, and each of its
    segments attends to itself. Raises ValueError for what has no fixed order.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if dropout:
        raise ValueError(f"{type(module).__name__} has attention dropout, which {CANNOT}. {REMEDY}")
    starts = torch.zeros(len(key), dtype=torch.int64, device=key.device)
    if packing is None:
        if attention_mask is not None and attention_mask.ndim == 2:  # a model may not hand the packing on
            starts = attention_mask.long().argmax(1)
        return _attend_with_gradient(query, key, value, starts, scale).transpose(1, 2), None
    if packing.keys is not None or packing.attention_mask is not None or packing.group is not None:
        raise ValueError(f"prompts that samples or ranks share are what {CANNOT}. {REMEDY}")
    segments = zip(*(x.split(packing.lengths[:, 0].tolist(), 2) for x in (query, key, value)), strict=True)
    outputs = [_attend_with_gradient(q, k, v, starts, scale) for q, k, v in segments]
    return torch.cat(outputs, 2).transpose(1, 2), None


def _attend_with_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, scale: float):
    compute, usual = (functools.partial(f, starts=starts, scale=scale) for f in (attend, _usual_attention))
    return _GradientOf.apply(compute, usual, q, k, v)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, flash_attention_mask)


def make_row_invariant(model: PreTrainedModel) -> None:
    """Let a model's forward compute each row in a fixed order; nothing if it does so already.

    Raises ValueError for a model with parts that cannot: only matrices of nn.Linear, embeddings, norms, rotary
    embeddings, the ACTIVATIONS and attention to all tokens before are known.
    """
    if model.config._attn_implementation == NAME:
        return
    name, text = type(model).__name__.removeprefix("FSDP"), model.config.get_text_config()
    refused = [f"its {key}" for key in ("sliding_window", "attn_logit_softcapping", "attention_chunk_size")
               if getattr(text, key, None) is not None and getattr(text, f"use_{key}", True)]  # fmt: skip
    linears, activations = [], []
    for path, part in model.named_modules():
        kind = type(part).__name__.removeprefix("FSDP")
        own = [parameter for parameter in part.parameters(recurse=False)]
        if type(part) is nn.Linear:
            linears.append(part)
        elif kind in ACTIVATIONS:
            activations.append((part, ACTIVATIONS[kind]))
        elif any(parameter.ndim > 1 for parameter in own) and not isinstance(part, nn.Embedding):
            refused.append(f"{path or name} ({kind})")
        elif not any(part.children()) and not _is_known(part, kind, bool(own)):
            refused.append(f"{path} ({kind})")
    if not refused:
        try:
            if model._supports_sdpa:
                model.set_attn_implementation(NAME)
        except ValueError:
            pass
        if model.config._attn_implementation != NAME:
            refused.append("its attention")
    if refused:
        shown = ", ".join(refused[:3]) + (f" and {len(refused) - 3} more" if len(refused) > 3 else "")
        raise ValueError(f"{name} has parts that {CANNOT}: {shown}. {REMEDY}")
    for linear in linears:
        linear.__class__ = RowInvariantLinear
    for part, compute in activations:
        part.forward = functools.partial(_GradientOf.apply, compute, part.forward)


def _is_known(part: nn.Module, kind: str, has_parameters: bool) -> bool:
    if has_parameters:
        return isinstance(part, nn.Embedding) or "Norm" in kind
    empty = isinstance(part, nn.ModuleDict | nn.ParameterDict | nn.ModuleList)
    return empty or kind in EXACT or "Norm" in kind or "Rotary" in kind
