"""Keys and values of a prefix that is computed once and attended to by several rounds.

The prefix's own graph is kept. Each round uses detached copies, where the gradients of all rounds accumulate; one
backward pass at the end takes those through the prefix. Works with every model that accepts a transformers cache.
"""

import torch
from transformers.cache_utils import Cache, DynamicLayer


class _PrefixLayer(DynamicLayer):
    """One layer's keys and values, [B, heads, P, head_dim]: stored with their graph, then lent detached to rounds."""

    is_compileable = False

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Keys and values that this forward attends to: the lent ones, if any, then its own."""
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
            return key_states, value_states
        return torch.cat([self.lent[0], key_states], 2), torch.cat([self.lent[1], value_states], 2)

    def lend(self) -> None:
        requires_grad = self.keys.requires_grad
        self.lent = tuple(t.detach().requires_grad_(requires_grad) for t in (self.keys, self.values))


class SharedPrefix(Cache):
    """Forward the prefix with it as `past_key_values`, call `lend()`, then forward and backward each round with it;
    `surrogate()` is the scalar whose backward pass takes the rounds' gradients through the prefix."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_PrefixLayer() for _ in range(layers)])

    def lend(self) -> None:
        """Make the detached copies in which the rounds' gradients accumulate."""
        for layer in self.layers:
            layer.lend()

    def surrogate(self) -> torch.Tensor:
        """Sum of each key and value times its accumulated gradient; layers that no round attended to add nothing."""
        pairs = [pair for layer in self.layers for pair in zip((layer.keys, layer.values), layer.lent, strict=True)]
        return sum((own * lent.grad).sum() for own, lent in pairs if lent.grad is not None)
