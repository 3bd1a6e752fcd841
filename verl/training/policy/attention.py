"""Attention on a batch without padding, behind transformers' attention interface.

transformers calls `packed_attention`, registered under NAME, with the flat row of a `Packing`. One of BACKENDS does the
work: "sdpa" runs everywhere and is the reference; the others are CUDA kernels that take segments as they are, without
padding, and "shared_prompt" also takes shared prefixes as they are, without copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from loguru import logger
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask
from transformers.utils import is_flash_attn_2_available

from verl.training.parallel.sequence_parallel import gather_heads_scatter_seq, gather_seq_scatter_heads
from verl.training.policy.packing import Packing

NAME = "verl_packed"
NAME_OF_FLASH = "verl_packed_fa2"  # for models whose config asks for FLASH; also without a packing
FLASH = "flash_attention_2"
SCORES_AT_A_TIME = 2**24  # of attention with a soft cap


def sdpa_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scale: float | None, dropout: float,
    window: int | None = None, cap: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Segments of about one length share a call, padded to the longest: query [1, H, T, D] -> [T, H, D]."""
    outputs = []
    for part in packing.parts(window):
        q, k, v = _rows(query, part.queries), _rows(key, part.keys), _rows(value, part.keys)
        if query.is_cuda and query.shape[1] != key.shape[1]:
            # With a mask or in float32, PyTorch's only CUDA kernel for grouped-query attention stores all scores.
            k, v = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (k, v))
        if cap is None:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=part.mask, is_causal=part.mask is None, scale=scale, dropout_p=dropout,
                enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip
        else:
            out = capped_attention(q, k, v, part.mask, scale, dropout, cap)
        outputs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))  # [S * Q, H * D]
    return F.embedding(packing.restore, torch.cat(outputs)).view(-1, query.shape[1], value.shape[3])


def capped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None,
    dropout: float, cap: float,
) -> torch.Tensor:  # fmt: skip
    """Attention whose scores are cap * tanh(score / cap) (Gemma 2, arXiv 2408.00118), which PyTorch's own has not.

    query [S, H, Q, D], key and value [S, h, K, D] -> [S, H, Q, D]. mask: bool (True = attended) or additive, up to
    [S, H, Q, K]; None: causal, the last query to all keys. SCORES_AT_A_TIME limits the memory of scores, which the
    backward pass computes again.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    mask = mask.expand(*mask.shape[:-2], queries, keys)

    def attend(q: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        scores = cap * torch.tanh((q @ key.transpose(2, 3)).float() * (scale / cap))
        hidden = torch.finfo(scores.dtype).min  # finite: -inf would give NaN in a row of padding
        scores = scores.masked_fill(~seen, hidden) if seen.dtype == torch.bool else scores + seen
        return F.dropout(scores.softmax(-1).to(q.dtype), dropout) @ value

    step = max(1, SCORES_AT_A_TIME // (query.shape[:2].numel() * keys))
    parts = zip(query.split(step, 2), mask.split(step, -2), strict=True)
    return torch.cat([checkpoint(attend, q, seen, use_reentrant=False) for q, seen in parts], 2)


def _rows(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """states [1, H, T, D] at flat positions index [S, Q] -> [S, H, Q, D].

    An embedding lookup: the backward pass of plain indexing is many times slower.
    """
    _, heads, tokens, width = states.shape
    flat = states.transpose(1, 2).reshape(tokens, heads * width)
    return F.embedding(index, flat).view(*index.shape, heads, width).transpose(1, 2)


def segment_attention(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A backend from `kernel(q [T, H, D], k [K, h, D], v, *segments, scale, dropout, window, cap) -> [T, H, D]`,
    causal, where the last query of a segment attends to all its keys, or to the last `window` of them. Keys of a shared
    prefix are copied for each segment that continues it.
    """

    def attend(query, key, value, packing, scale, dropout, window=None, cap=None):
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        if packing.key_index is not None:
            k, v = (F.embedding(packing.key_index, x.flatten(1)).view(-1, *x.shape[1:]) for x in (k, v))
        return kernel(q, k, v, *packing.segments, scale, dropout, window, cap)

    return attend


def _varlen(q, k, v, query_ends, key_ends, most_queries, most_keys, scale, dropout, window, cap):
    from torch.nn.attention.varlen import varlen_attn

    before = -1 if window is None else window - 1  # the kernels do not count a query's own key; -1: no limit
    options = {"scale": scale, "window_size": (before, 0), "enable_gqa": q.shape[1] != k.shape[1]}
    return varlen_attn(q, k, v, query_ends, key_ends, most_queries, most_keys, **options)


def _flash_attn(q, k, v, query_ends, key_ends, most_queries, most_keys, scale, dropout, window, cap):
    from flash_attn import flash_attn_varlen_func

    options = {"softmax_scale": scale, "dropout_p": dropout, "causal": True, "softcap": cap or 0.0}
    options["window_size"] = (-1, -1) if window is None else (window - 1, 0)
    return flash_attn_varlen_func(q, k, v, query_ends, key_ends, most_queries, most_keys, **options)


class MergingKernel(NamedTuple):
    """Attention on segments that also gives the log-sum-exp of the scores, and its backward pass from both."""

    # (q [T, H, D], k [K, h, D], v, *segments, causal, scale) -> output [T, H, D], log-sum-exp [H, T] float32
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    # (gradient of the output, q, k, v, output, log-sum-exp, *segments, causal, scale) -> gradients of q, k, v
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def shared_prompt_attention(kernel: MergingKernel) -> Callable[..., torch.Tensor]:
    """A backend for a packing with shared prefixes, none of which is copied: without dropout, window or soft cap."""

    def attend(query, key, value, packing, scale, dropout, window=None, cap=None):
        q, k, v = (states[0, :, : query.shape[2]].transpose(0, 1) for states in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return _SharedPromptAttention.apply(q, k, v, kernel, packing, scale)

    return attend


class _SharedPromptAttention(torch.autograd.Function):
    """A pass of all segments to themselves, then one for each depth of the tree: to the ancestors of that depth.

    The outputs of a query are merged by their log-sum-exp. With the merged output and log-sum-exp the kernel's own
    backward pass gives the part of each pass in the gradients (as in Ring Attention, arXiv 2310.01889).
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: MergingKernel, packing: Packing,
        scale: float,
    ) -> torch.Tensor:  # fmt: skip
        out, lse = kernel.forward(q, k, v, *packing.own_segments, True, scale)
        for segments, below, above in packing.ancestors:
            further, more = kernel.forward(q[below], k[above], v[above], *segments, False, scale)
            own = lse[:, below]
            merged = torch.logaddexp(own, more)
            parts = ((out[below], own), (further, more))
            both = sum(part.float() * (log - merged).exp().T.unsqueeze(-1) for part, log in parts)
            out = out.index_copy(0, below, both.to(out.dtype))
            lse = lse.index_copy(1, below, merged)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.arguments = kernel, packing, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (q, k, v, out, lse), (kernel, packing, scale) = ctx.saved_tensors, ctx.arguments
        gradient = gradients[0].contiguous()
        of_q, of_k, of_v = kernel.backward(gradient, q, k, v, out, lse, *packing.own_segments, True, scale)
        for segments, below, above in packing.ancestors:
            inputs = gradient[below], q[below], k[above], v[above], out[below], lse[:, below].contiguous()
            more = kernel.backward(*inputs, *segments, False, scale)
            for total, index, part in zip((of_q, of_k, of_v), (below, above, above), more, strict=True):
                total.index_add_(0, index, part)
        return of_q, of_k, of_v, None, None, None


def _flash_forward(q, k, v, query_ends, key_ends, most_queries, most_keys, causal, scale):
    limits = query_ends, key_ends, most_queries, most_keys
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *limits, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(gradient, q, k, v, out, lse, query_ends, key_ends, most_queries, most_keys, causal, scale):
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    limits = query_ends, key_ends, most_queries, most_keys
    return torch.ops.aten._flash_attention_backward(
        gradient, q, k, v, out, lse, *limits, 0.0, causal, *no_dropout, scale=scale
    )


# name -> (query [1, H, T, D], key and value [1, h, T, D], packing, scale, dropout, window, cap) -> [T, H, D]
BACKENDS: dict[str, Callable[..., torch.Tensor]] = {
    "sdpa": sdpa_attention, "varlen": segment_attention(_varlen), "flash_attn": segment_attention(_flash_attn),
    "shared_prompt": shared_prompt_attention(MergingKernel(_flash_forward, _flash_backward)),
}  # fmt: skip


def choose_backend(
    query: torch.Tensor, value: torch.Tensor, packing: Packing, dropout: float, window: int | None = None,
    cap: float | None = None,
) -> str:  # fmt: skip
    """Flash attention on CUDA in half precision, by flash-attn if it is installed, else by torch; "sdpa" elsewhere.

    Its kernels need values as wide as queries (those of multi-head latent attention are not), of at most 256. Shared
    prefixes are read in passes of their own, by torch, unless there is dropout, a window or a soft cap, or most of them
    are continued once: a copy of their keys costs less then. Only flash-attn has soft caps.
    """
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16) or packing.attention_mask is not None:
        return "sdpa"
    if value.shape[-1] != query.shape[-1] or query.shape[-1] > 256:
        return "sdpa"
    merges = dropout == 0 and window is None and cap is None
    if packing.parents is not None and merges and len(packing.parents.unique()) - 1 < len(packing.lengths) / 2:
        return "shared_prompt"
    if is_flash_attn_2_available():  # not flash-attn 4, which installs another package of the same name
        return "flash_attn"
    return "varlen" if dropout == 0 and cap is None else "sdpa"


def packed_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    packing: Packing | None = None, **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, h, T, D] -> [1, T, H, D].

    Without `packing` it is transformers' own attention, and with a soft cap, which its "sdpa" leaves out, this one's.
    Where ranks share the flat row, T is this rank's part of it, and each rank runs attention for some of the heads
    (DeepSpeed Ulysses, arXiv 2309.14509). A window counts tokens of a segment; `packing.attention_mask` replaces it.
    """
    window, cap = kwargs.get("sliding_window"), kwargs.get("softcap")
    if packing is None:
        plain = sdpa_attention_forward
        if module.config._attn_implementation == NAME_OF_FLASH:
            # It takes the name of its kernel from the module's config.
            named = SimpleNamespace(_attn_implementation=FLASH, dtype=module.config.dtype)
            parts = {name: getattr(module, name, None) for name in ("is_causal", "layer_idx", "modules")}
            module, plain = SimpleNamespace(config=named, **parts), flash_attention_forward
        elif cap is not None:
            return capped_attention(query, key, value, attention_mask, scaling, dropout, cap).transpose(1, 2), None
        return plain(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    if window is not None and (packing.attention_mask is not None or window >= packing.segments.most_keys):
        window = None
    backend, group = BACKENDS[choose_backend(query, value, packing, dropout, window, cap)], packing.group
    if group is None:
        return backend(query, key, value, packing, scaling, dropout, window, cap).unsqueeze(0), None
    ranks = dist.get_world_size(group)
    copies = ranks // math.gcd(key.shape[1], ranks)  # ranks with query heads of one key head each get it
    key, value = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value))
    kept = packing.length if packing.keys is None else 0  # else they are chosen by their index
    query, key, value = (
        gather_seq_scatter_heads(x, 2, 1, size, group)
        for x, size in ((query, packing.length), (key, kept), (value, kept))
    )
    output = backend(query, key, value, packing, scaling, dropout, window, cap).unsqueeze(0)  # [1, T, H / ranks, D]
    return gather_heads_scatter_seq(output, 2, 1, group), None


for _name, _mask in ((NAME, sdpa_mask), (NAME_OF_FLASH, flash_attention_mask)):
    AttentionInterface.register(_name, packed_attention)
    AttentionMaskInterface.register(_name, _mask)


def make_packable(model: PreTrainedModel, shared: bool = False, wanted: bool = True) -> bool:
    """Switch the model to `packed_attention` if that is `wanted`, `shared`, or needed for a soft cap; whether rows may
    be packed. If its attention cannot be replaced, a warning says so.

    A model with FLASH keeps it for batches with padding. `shared`: ranks share its sequences, which no other attention
    can do; ValueError if it cannot be replaced.
    """
    wanted, names = wanted or shared, (NAME, NAME_OF_FLASH)
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    left_out = capped and model.config._attn_implementation == "sdpa"
    if model.config._attn_implementation in names or not (wanted or left_out):
        return wanted
    name = NAME_OF_FLASH if model.config._attn_implementation == FLASH else NAME
    try:
        if model._supports_sdpa:  # others have attention sinks (gpt-oss) or the like, which this attention lacks
            model.set_attn_implementation(name)
    except ValueError as error:
        logger.debug("{}", error)
    if model.config._attn_implementation != name:
        if shared:
            raise ValueError(
                f"ulysses_sequence_parallel_size is above 1, but the attention of {type(model).__name__} cannot be "
                "replaced by one that ranks share; set it to 1."
            )
        logger.warning("the attention of {} cannot be replaced: batches keep their padding, and prompts are not shared",
                       type(model).__name__)  # fmt: skip
        return False
    return wanted
