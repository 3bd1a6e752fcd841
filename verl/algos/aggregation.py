"""Masked statistics, and the aggregation of a per-token loss, independent of how a batch is cut into micro-batches."""

from dataclasses import dataclass

import torch

from verl.config.actor import LOSS_AGG_MODES


def masked_sum(values: torch.Tensor, mask: torch.Tensor, axis: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """Sum of values * mask, both [...], over `axis` (None: all); values whose mask is 0 may be NaN or infinite."""
    return (torch.where(mask.bool(), values, 0.0) * mask).sum(dim=axis)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, axis: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """Mean over `axis` (None: all) of the values [...] whose mask [...] is 1; 0 where no mask is."""
    return masked_sum(values, mask, axis) / (mask.sum(dim=axis) + 1e-8)


def masked_var(values: torch.Tensor, mask: torch.Tensor, unbiased: bool = True) -> torch.Tensor:
    """Variance [] of the values [...] whose mask [...] is 1; ValueError if `unbiased` and fewer than two are."""
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    if not unbiased:
        return variance
    count = mask.sum()
    if count <= 1:
        raise ValueError(f"an unbiased variance needs two unmasked values, the mask has {count.item():g}")
    return variance * count / (count - 1)


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """Values [...] scaled to variance 1 over the mask [...], and to mean 0 with `shift_mean`; of the same shape."""
    mean, var = masked_mean(values, mask), masked_var(values, mask)
    whitened = (values - mean) * torch.rsqrt(var + 1e-8)
    return whitened if shift_mean else whitened + mean


@dataclass(frozen=True)
class StepCounts:
    """What the losses of one mini-batch are divided by, named as `agg_loss` takes it: counts over all ranks.

    Attributes:
        dp_size: ranks whose gradients are averaged.
        batch_num_tokens: counted tokens; None counts those of the tensors at hand.
        global_batch_size: sequences with a counted token; None counts those of the tensors at hand.
        loss_scale_factor: divisor of a sequence's sum in `seq-mean-token-sum-norm`; None is the number of columns.
    """

    dp_size: int = 1
    batch_num_tokens: int | None = None
    global_batch_size: int | None = None
    loss_scale_factor: int | None = None


def agg_loss(
    loss_mat: torch.Tensor, loss_mask: torch.Tensor, loss_agg_mode: str, dp_size: int = 1,
    batch_num_tokens: int | torch.Tensor | None = None, global_batch_size: int | torch.Tensor | None = None,
    loss_scale_factor: int | None = None,
) -> torch.Tensor:
    """One number from a loss per token: loss_mat [B, T], loss_mask [B, T] (1 = counted) -> scalar.

    - `token-mean`: sum of all tokens / tokens.
    - `seq-mean-token-sum`: mean over sequences of the token sum.
    - `seq-mean-token-mean`: mean over sequences of the token mean.
    - `seq-mean-token-sum-norm`: mean over sequences of the token sum / `loss_scale_factor` (default T; Dr. GRPO,
      arXiv 2503.20783: a constant divisor, so that long answers are not favoured).
    - `token-sum`: sum of all tokens; its gradient grows with the batch.

    `batch_num_tokens` and `global_batch_size` (sequences with at least one counted token) are the counts of the
    full mini-batch over all ranks; with them the losses of micro-batches and ranks add up to the loss of the
    full mini-batch, given that data-parallel gradients are averaged (hence the factor `dp_size`). Without them the
    tensors given here are counted.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ValueError(f"loss_agg_mode={loss_agg_mode!r} is unknown. Known: {', '.join(LOSS_AGG_MODES)}.")
    tokens = loss_mask.sum(-1)  # [B]
    if loss_agg_mode == "token-sum":
        return masked_sum(loss_mat, loss_mask) * dp_size
    if loss_agg_mode == "token-mean":
        total = masked_sum(loss_mat, loss_mask)
        count = tokens.sum() if batch_num_tokens is None else batch_num_tokens
    else:
        per_sequence = masked_sum(loss_mat, loss_mask, axis=-1)  # [B]
        if loss_agg_mode == "seq-mean-token-mean":
            per_sequence = per_sequence / tokens.clamp(min=1)
        elif loss_agg_mode == "seq-mean-token-sum-norm":
            per_sequence = per_sequence / (loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor)
        total = per_sequence.sum()
        count = (tokens > 0).sum() if global_batch_size is None else global_batch_size
    # At least one: a batch without a counted token has loss 0, not NaN.
    return total / (count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)) * dp_size
