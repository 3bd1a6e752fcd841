"""Attention of a few tokens over a cache, without repeating the keys and values that query heads share."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "grouped_sdpa"


def grouped_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0, **kwargs,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' attention interface: query [B, H, q, D], key and value [B, h, k, D] -> [B, q, H, D].

    Given a mask [B, 1, q, k], transformers' own repeats keys and values H / h times, which takes CPUs many times as
    long as the attention of one token. Here the H / h query heads of a key head are H / h * q queries of one head.
    """
    groups = query.shape[1] // key.shape[1]
    if groups == 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout,
                                      **kwargs)  # fmt: skip
    mask = attention_mask.expand(-1, groups, -1, -1).flatten(1, 2).unsqueeze(1)  # [B, 1, H / h * q, k]
    queries = query.unflatten(1, (-1, groups)).flatten(2, 3)  # [B, h, H / h * q, D]
    output = scaled_dot_product_attention(queries, key, value, mask, dropout, scale=scaling)
    return output.unflatten(2, (groups, -1)).flatten(1, 2).transpose(1, 2), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def grouped_queries(model: nn.Module) -> Iterator[None]:
    """Replace transformers' "sdpa" by `grouped_attention` for a while, in a model on a CPU."""
    if model.device.type != "cpu" or model.config._attn_implementation != "sdpa":
        yield
        return
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
