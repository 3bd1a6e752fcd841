"""Log-probs and entropy under an output matrix without its logits being held, forward or backward.

A few tokens' logits are made at a time, always in the same memory. The backward pass makes them again, but for the last
ones, which lie there still, and turns them, in place, into their own gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig


@dataclass(frozen=True)
class FinalLogits:
    """What some families do between the output matrix and the softmax: outer * tanh(inner * x), or outer * x."""

    inner: float | None
    outer: float

    @classmethod
    def of(cls, config: PretrainedConfig, temperature: float = 1.0) -> FinalLogits:
        """As the model's config says, then over the temperature."""
        described = config.to_dict()
        keys = ("final_logit_softcapping", "logit_scale", "logits_scaling")
        cap, scale, divisor = (described.get(key) for key in keys)
        factor = (1.0 if scale is None else scale) / (1.0 if divisor is None else divisor)
        return cls(None, factor / temperature) if cap is None else cls(factor / cap, cap / temperature)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, V] -> [N, V], differentiable."""
        if self.inner is not None:
            logits = torch.tanh(logits * self.inner)
        return logits if self.outer == 1 else logits * self.outer

    def apply_(self, logits: torch.Tensor) -> torch.Tensor:
        """The same in place."""
        if self.inner is not None:
            logits.mul_(self.inner).tanh_()
        return logits if self.outer == 1 else logits.mul_(self.outer)

    def bend(self, final: torch.Tensor) -> torch.Tensor | None:
        """Derivative by the input that gave `final` [N, V], over `outer`; None where that is 1 throughout."""
        if self.inner is None:
            return None
        return (final / self.outer).square_().neg_().add_(1).mul_(self.inner)


def is_plain(head: nn.Module) -> bool:
    """Whether a head's output is its weight's product (plus bias) and no more, of whole tensors."""
    hooked = head._forward_hooks or head._forward_pre_hooks
    return type(head) is nn.Linear and not hooked and not isinstance(head.weight, DTensor)


def chunked_log_probs(
    head: nn.Linear,
    final: FinalLogits,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    *,
    with_entropy: bool,
    chunk_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [N, H], labels [N] -> log-probs [N], entropy [N] (zeros when not asked), float32 (float64 of float64).

    The product is taken in the type of the weights (under autocast in its type), everything after it in float32. The
    weight's gradient is summed in the product's type. For a head that `is_plain`; not twice differentiable.
    """
    weight, bias, device = head.weight, head.bias, hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return _ChunkedLogProbs.apply(hidden, weight, bias, labels, final, with_entropy, chunk_tokens)


class _ChunkedLogProbs(torch.autograd.Function):
    """hidden [N, H], weight [V, H], bias [V] or None, labels [N] -> log-probs [N], entropy [N]."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, final, with_entropy, chunk_tokens):
        logits_of = _Logits(weight, bias, final, min(chunk_tokens, len(hidden)))
        log_probs, entropy = (hidden.new_zeros(len(hidden), dtype=logits_of.dtype) for _ in range(2))
        for at in _cuts(len(hidden), chunk_tokens):
            log_probs[at, None], entropy[at, None] = _reduced(logits_of(hidden[at]), labels[at, None], with_entropy)
        ctx.save_for_backward(hidden, weight, bias, labels, entropy)
        ctx.logits_of, ctx.final, ctx.chunk_tokens = logits_of, final, chunk_tokens
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, by_log_prob, by_entropy):
        hidden, weight, bias, labels, entropy = ctx.saved_tensors
        by_log_prob = torch.zeros_like(entropy) if by_log_prob is None else by_log_prob
        logits_of, ctx.logits_of = ctx.logits_of, None  # a second backward pass would find a gradient in it
        if logits_of is None:
            logits_of = _Logits(weight, bias, ctx.final, min(ctx.chunk_tokens, len(hidden)))
        inputs = zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        by_hidden, by_weight, by_bias = (torch.zeros_like(x) if needed else None for x, needed in inputs)
        for at in reversed(_cuts(len(hidden), ctx.chunk_tokens)):
            tokens = (labels, entropy, by_log_prob, by_entropy)
            columns = (None if column is None else column[at, None] for column in tokens)
            grad, factor = logits_of.gradient(hidden[at], *columns)
            if by_hidden is not None:
                torch.mm(grad, weight, out=by_hidden[at])
                by_hidden[at].mul_(factor)
            if by_weight is not None:
                by_weight.addmm_(grad.T, (hidden[at] * factor).to(grad.dtype))
            if by_bias is not None:
                by_bias.addmv_(grad.T, factor[:, 0].to(grad.dtype))
        return by_hidden, by_weight, by_bias, None, None, None, None


def _cuts(rows: int, chunk: int) -> list[slice]:
    """Slices of `chunk` rows, one with what is left over in front: the last chunk is the one that is kept."""
    return [slice(max(0, end - chunk), end) for end in range(rows, 0, -chunk)][::-1]


class _Logits:
    """Final logits of one chunk after the other, in the same memory; their type is float32 at least."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, final: FinalLogits, rows: int):
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
        self._last = self.final.apply_(logits)
        return self._last

    def gradient(self, hidden, labels, entropy, by_log_prob, by_entropy) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [n, H], all else [n, 1] -> the gradient by the head's output is grad [n, V] times factor [n, 1].

        grad has the output's type and memory. The factor is the caller's, who has it cheaper on rows of H than of V.

        The first call is for the chunk of the last call of all: what `_reduced` left of it are its logits less a
        constant, and the softmax does not mind. A soft cap does: its slope is that at the logits themselves.
        """
        logits = self(hidden) if self._last is None or self.final.inner is not None else self._last
        self._last = None
        bend = self.final.bend(logits)
        grad, factor = _turned_into_gradient(logits, labels, entropy, by_log_prob, by_entropy)
        if bend is not None:
            grad.mul_(bend)
        if self._logits is not self._product:
            grad = self._product[: len(grad)].copy_(grad)
        return grad, factor * self.final.outer


def _reduced(logits: torch.Tensor, labels: torch.Tensor, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, V], overwritten, labels [n, 1] -> log-probs [n, 1], entropy [n, 1] (zeros when not asked)."""
    log_p = torch.log_softmax(logits, -1, out=logits)
    chosen = log_p.gather(-1, labels)
    entropy = log_p.exp().mul_(log_p).sum(-1, keepdim=True).neg_() if with_entropy else torch.zeros_like(chosen)
    return chosen, entropy


def _turned_into_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    entropy: torch.Tensor,
    by_log_prob: torch.Tensor,
    by_entropy: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Final logits z [n, V] become by_log_prob d log p_y / dz + by_entropy dE / dz over a factor; all else [n, 1].

    With p = softmax(z) and E its entropy: d log p_y / dz = 1_y - p, dE / dz = -p (log p + E).
    """
    if by_entropy is None:
        grad, of_label, factor = torch.softmax(logits, -1, out=logits), torch.ones_like(by_log_prob), -by_log_prob
    else:
        log_p = torch.log_softmax(logits, -1, out=logits)
        p = log_p.exp()
        grad = log_p.add_(entropy).mul_(by_entropy).add_(by_log_prob).mul_(p)
        of_label, factor = by_log_prob, by_log_prob.new_full(by_log_prob.shape, -1)
    return grad.scatter_(-1, labels, grad.gather(-1, labels) - of_label), factor
