"""The chunked output head: log-probs, entropy and argmax without the full [tokens, vocab] logits, forward or backward.

Logits are computed for a few tokens at a time. The backward pass recomputes them, except for the last chunk's, which
are still in memory, and turns them in place into their own gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from verl.protocol.sampling_mask import REMOVED, KeptTokens


@dataclass(frozen=True)
class FinalLogits:
    """What follows the output matrix: outer * tanh(inner * x), or outer * x without `inner` (no soft cap)."""

    inner: float | None
    outer: float

    @classmethod
    def of(cls, config: PretrainedConfig, temperature: float = 1.0) -> FinalLogits:
        """The soft cap and scale of the model's config, divided by the temperature."""
        values = config.to_dict()
        keys = ("final_logit_softcapping", "logit_scale", "logits_scaling")
        cap, scale, divisor = (values.get(key) for key in keys)
        factor = (1.0 if scale is None else scale) / (1.0 if divisor is None else divisor)
        return cls(None, factor / temperature) if cap is None else cls(factor / cap, cap / temperature)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, V] -> [N, V], differentiable."""
        if self.inner is not None:
            logits = torch.tanh(logits * self.inner)
        return logits if self.outer == 1 else logits * self.outer


class HeadOutput(NamedTuple):
    """Per token, [N] each: log_probs and entropy (float32; float64 for float64 heads), argmax (int64).

    Entropy and argmax are zeros unless requested.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    argmax: torch.Tensor


def head_size(head: nn.Module) -> int:
    """Number of a head's outputs."""
    return getattr(head, "out_features", None) or len(head.weight)


def is_plain(head: nn.Module) -> bool:
    """Whether a head is exactly a product with its weight (plus bias), held as unsharded tensors."""
    hooked = head._forward_hooks or head._forward_pre_hooks
    return type(head) is nn.Linear and not hooked and not isinstance(head.weight, DTensor)


def chunked_log_probs(
    head: nn.Module, final: FinalLogits, hidden: torch.Tensor, labels: torch.Tensor, *, chunk_tokens: int,
    with_entropy: bool = False, with_argmax: bool = False, compiled: bool = False, kept: KeptTokens | None = None,
) -> HeadOutput:  # fmt: skip
    """Log-probs of `labels` [N] int64 (at least 0) for the states `hidden` [N, H]; not twice differentiable.

    `kept`: the tokens that the distribution at each of the N positions is restricted to; the label must be one of them.

    The product has the type of the weights (or of autocast), everything after it is float32. Heads that are not
    `is_plain` (adapters, hooks, sharded by themselves), and calls with argmax or `compiled` (torch.compile of a chunk),
    use checkpointed chunks, whose rounding differs in the last bits.
    """
    if not is_plain(head) or with_argmax or compiled:
        one_chunk = _compiled_chunk() if compiled and kept is None else _one_chunk
        pieces = []
        for start in range(0, max(1, len(hidden)), chunk_tokens):
            part, part_labels = hidden[start : start + chunk_tokens], labels[start : start + chunk_tokens]
            removed = None if kept is None else kept.removed(head_size(head), start, start + len(part))
            args = (head, final, part, part_labels, with_entropy, with_argmax, removed)
            if torch.is_grad_enabled():  # autograd recomputes the chunk's logits in the backward pass
                pieces.append(checkpoint(one_chunk, *args, use_reentrant=False, preserve_rng_state=False))
            else:
                pieces.append(one_chunk(*args))
        return HeadOutput(*(torch.cat(column) for column in zip(*pieces, strict=True)))
    weight, bias, device = head.weight, head.bias, hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    columns = _ChunkedLogProbs.apply(hidden, weight, bias, labels, final, with_entropy, chunk_tokens, kept)
    return HeadOutput(*columns, torch.zeros_like(labels))


def _one_chunk(
    head: nn.Module, final: FinalLogits, hidden: torch.Tensor, labels: torch.Tensor, with_entropy: bool,
    with_argmax: bool, removed: torch.Tensor | None = None,
) -> HeadOutput:  # fmt: skip
    logits = final(head(hidden).float())  # [N, V]
    if removed is not None:
        logits = logits.masked_fill(removed, REMOVED)
    log_z = torch.logsumexp(logits, dim=-1)
    log_probs = logits.gather(-1, labels[:, None]).squeeze(-1) - log_z
    entropy = log_z - (torch.softmax(logits, dim=-1) * logits).sum(-1) if with_entropy else torch.zeros_like(log_probs)
    argmax = logits.detach().argmax(-1) if with_argmax else torch.zeros_like(labels)
    return HeadOutput(log_probs, entropy, argmax)


@functools.cache
def _compiled_chunk() -> Callable[..., HeadOutput]:
    return torch.compile(_one_chunk, dynamic=True)


class _ChunkedLogProbs(torch.autograd.Function):
    """hidden [N, H], weight [V, H], bias [V] or None, labels [N] -> log-probs [N], entropy [N]."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, final, with_entropy, chunk_tokens, kept):
        logits_of = _Logits(weight, bias, final, min(chunk_tokens, len(hidden)))
        log_probs, entropy = (hidden.new_zeros(len(hidden), dtype=logits_of.dtype) for _ in range(2))
        for at in _chunks(len(hidden), chunk_tokens):
            logits = logits_of(hidden[at])
            if kept is not None:
                logits.masked_fill_(kept.removed(len(weight), at.start, at.stop), REMOVED)
            log_p = torch.log_softmax(logits, -1, out=logits)
            log_probs[at, None] = log_p.gather(-1, labels[at, None])
            if with_entropy:
                entropy[at, None] = log_p.exp().mul_(log_p).sum(-1, keepdim=True).neg_()
        ctx.save_for_backward(hidden, weight, bias, labels, entropy)
        ctx.logits_of, ctx.final, ctx.chunk_tokens, ctx.kept = logits_of, final, chunk_tokens, kept
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, bias, labels, entropy = ctx.saved_tensors
        grad_log_probs = torch.zeros_like(entropy) if grad_log_probs is None else grad_log_probs
        logits_of, ctx.logits_of = ctx.logits_of, None  # this pass overwrites its logits; a second one needs new ones
        if logits_of is None:
            logits_of = _Logits(weight, bias, ctx.final, min(ctx.chunk_tokens, len(hidden)))
        # Sums over chunks are float32: bfloat16 would lose what is below 1/256 of a sum. Autograd casts the result.
        wide = torch.promote_types(weight.dtype, torch.float32)
        inputs = zip((hidden, weight, bias), (hidden.dtype, wide, wide), ctx.needs_input_grad, strict=False)
        grad_hidden, grad_weight, grad_bias = (
            torch.zeros_like(x, dtype=dtype) if needed else None for x, dtype, needed in inputs
        )
        for at in reversed(_chunks(len(hidden), ctx.chunk_tokens)):
            tokens = (labels, entropy, grad_log_probs, grad_entropy)
            columns = (None if column is None else column[at, None] for column in tokens)
            removed = None if ctx.kept is None else ctx.kept.removed(len(weight), at.start, at.stop)
            grad, factor = logits_of.gradient(hidden[at], *columns, removed)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[at])
                grad_hidden[at].mul_(factor)
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, (hidden[at] * factor).to(grad.dtype))
            if grad_bias is not None:
                _add_product(grad_bias[:, None], grad.T, factor.to(grad.dtype))
        return grad_hidden, grad_weight, grad_bias, *[None] * 5


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, summed in total's type; a CPU kernel rounds the product of bfloat16 matrices before."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


def _chunks(rows: int, size: int) -> list[slice]:
    """Slices of `size` rows; the remainder comes first, so that the buffer ends with a full chunk."""
    return [slice(max(0, end - size), end) for end in range(rows, 0, -size)][::-1]


class _Logits:
    """Final logits of one chunk after another, in the same buffers; float32, or the weight's type if wider."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, final: FinalLogits, rows: int) -> None:
        self.weight, self.bias, self.final = weight, bias, final
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        self._product = self._logits = weight.new_empty(rows, len(weight))
        if weight.dtype != self.dtype:
            self._logits = torch.empty_like(self._product, dtype=self.dtype)
        self._last: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, H] -> [n, V], valid until the next call."""
        product, logits = self._product[: len(hidden)], self._logits[: len(hidden)]
        if self.bias is None:
            torch.mm(hidden, self.weight.T, out=product)
        else:
            torch.addmm(self.bias, hidden, self.weight.T, out=product)
        if self._logits is not self._product:
            logits.copy_(product)
        if self.final.inner is not None:
            logits.mul_(self.final.inner).tanh_()
        self._last = logits if self.final.outer == 1 else logits.mul_(self.final.outer)
        return self._last

    def gradient(
        self, hidden, labels, entropy, grad_log_probs, grad_entropy, removed=None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [n, H], the others [n, 1] -> the gradient by the head's output is grad [n, V] times factor [n, 1].

        removed: bool [n, V], tokens with probability 0, or None.

        grad has the output's type and buffer. The caller applies the factor, to rows of H rather than of V numbers.
        With final logits z, p = softmax(z) and its entropy E, the gradient by z is
        grad_log_probs * (1_y - p) - grad_entropy * p (log p + E).

        The first call must be for the chunk of the last `__call__`: the forward pass left its logits minus a constant
        there, which softmax ignores. A soft cap does not: its slope needs the logits themselves.
        """
        inner, outer = self.final.inner, self.final.outer
        logits = self(hidden) if self._last is None or inner is not None else self._last
        self._last = None
        slope = None if inner is None else (logits / outer).square_().neg_().add_(1).mul_(inner)
        if removed is not None:
            logits.masked_fill_(removed, REMOVED)
        if grad_entropy is None:
            grad, at_label = torch.softmax(logits, -1, out=logits), torch.ones_like(grad_log_probs)
            factor = -grad_log_probs
        else:
            log_p = torch.log_softmax(logits, -1, out=logits)
            p = log_p.exp()
            grad, at_label = log_p.add_(entropy).mul_(grad_entropy).add_(grad_log_probs).mul_(p), grad_log_probs
            factor = grad_log_probs.new_full(grad_log_probs.shape, -1)
        grad.scatter_(-1, labels, grad.gather(-1, labels) - at_label)
        if slope is not None:
            grad.mul_(slope)
        if self._logits is not self._product:
            grad = self._product[: len(grad)].copy_(grad)
        return grad, factor * outer
