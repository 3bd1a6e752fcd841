"""Turns a per-token loss into one number that does not depend on how a batch is cut into micro-batches."""

from dataclasses import dataclass

import torch

from verl.config.actor import LOSS_AGG_MODES
from verl.utils.torch_functional import masked_sum


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

    `batch_num_tokens` and `global_batch_size` (sequences with at least one counted token) are the counts of the
    full mini-batch over all ranks; with them the losses of micro-batches and ranks add up to the loss of the
    full mini-batch, given that data-parallel gradients are averaged (hence the factor `dp_size`). Without them the
    tensors given here are counted.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ValueError(f"loss_agg_mode={loss_agg_mode!r} is unknown. Known: {', '.join(LOSS_AGG_MODES)}.")
    tokens = loss_mask.sum(-1)  # [B]
    if loss_agg_mode == "token-mean":
        divisor = tokens.sum() if batch_num_tokens is None else batch_num_tokens
        return masked_sum(loss_mat, loss_mask) / _at_least_one(divisor) * dp_size
    per_sequence = masked_sum(loss_mat, loss_mask, axis=-1)  # [B]
    if loss_agg_mode == "seq-mean-token-mean":
        per_sequence = per_sequence / tokens.clamp(min=1)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        per_sequence = per_sequence / (loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    divisor = (tokens > 0).sum() if global_batch_size is None else global_batch_size
    return per_sequence.sum() / _at_least_one(divisor) * dp_size


def _at_least_one(count: int | torch.Tensor) -> int | torch.Tensor:
    """A batch without a counted token has loss 0, not NaN."""
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)
