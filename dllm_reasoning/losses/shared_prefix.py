"""Keys and values of a prefix that is forwarded once, for several rounds that look at it.

The prefix's own graph is kept; each round sees detached copies whose gradients add up over the rounds, and one
backward pass at the end takes those through the prefix. Works with every model that takes a transformers cache.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class _PrefixLayer(CacheLayerMixin):
    """One layer's keys and values, [B, heads, P, head_dim]: first kept with their graph, then lent to rounds."""

    is_compileable = False

    def __init__(self) -> None:
        super().__init__()
        self.lent: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = key_states, value_states
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """What the queries of this forward see: their own keys and values, behind the lent ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        return torch.cat([self.lent[0], key_states], 2), torch.cat([self.lent[1], value_states], 2)

    def lend(self) -> None:
        wanted = self.keys.requires_grad
        self.lent = tuple(t.detach().requires_grad_(wanted) for t in (self.keys, self.values))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1


class SharedPrefix(Cache):
    """Forward the prefix with it as `past_key_values`, call `lend()`, then forward and backward each round with it;
    `surrogate()` is the scalar whose backward pass takes the rounds' gradients through the prefix."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_PrefixLayer() for _ in range(layers)])

    def lend(self) -> None:
        """Detach; gradients of the rounds gather at the detached copies."""
        for layer in self.layers:
            layer.lend()

    def surrogate(self) -> torch.Tensor:
        """Sum of each key and value times its gathered gradient; a layer that no round looked at adds nothing."""
        pairs = [pair for layer in self.layers for pair in zip((layer.keys, layer.values), layer.lent, strict=True)]
        return sum((kept * lent.grad).sum() for kept, lent in pairs if lent.grad is not None)
