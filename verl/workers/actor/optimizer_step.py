"""One optimizer step on a mini-batch, the same for policy and value model: counts, accumulation, metrics."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from tensordict import TensorDict

from verl.protocol import DataProto
from verl.workers.engine import FSDPEngine, StepResult

#: micro-batch -> (loss to differentiate, parts that add up over micro-batches, means over this one's counted tokens)
LossOf = Callable[[TensorDict], tuple[torch.Tensor, dict[str, float], dict[str, float]]]


@dataclass(frozen=True)
class StepCounts:
    """Counts over all ranks that the losses of one mini-batch are divided by, named as `agg_loss` takes them."""

    dp_size: int
    batch_num_tokens: int
    global_batch_size: int  # sequences with a counted token


def global_counts(engine: FSDPEngine, response_mask: torch.Tensor) -> StepCounts:
    """The counts of a mini-batch from this rank's response_mask [B, R], 1 = counted; a collective call."""
    counts = torch.stack([response_mask.sum(), (response_mask.sum(-1) > 0).sum()]).to(engine.device)
    dist.all_reduce(counts)
    tokens, sequences = (int(c) for c in counts.tolist())
    return StepCounts(engine.get_data_parallel_size(), tokens, sequences)


def accumulate_and_step(
    engine: FSDPEngine, micros: Sequence[tuple[Any, DataProto]], loss_of: LossOf, tokens: int, grad_clip: float
) -> tuple[dict[str, float], StepResult]:
    """Gradients of all micro-batches, then one step.

    `tokens`: counted tokens of the mini-batch on all ranks. Metrics are this rank's share times the number of ranks:
    their mean over ranks is the value of the whole, and of names with "max" the maximum.
    """
    sums: dict[str, float] = defaultdict(float)
    largest: dict[str, float] = defaultdict(lambda: -math.inf)
    engine.optimizer_zero_grad()
    for number, (_, micro) in enumerate(micros):
        batch = micro.to(engine.device).batch
        loss, additive, means = loss_of(batch)
        engine.backward(loss, is_last_micro_batch=number == len(micros) - 1)
        share = batch["response_mask"].sum().item() * engine.get_data_parallel_size() / tokens
        for name, value in additive.items():
            sums[name] += value
        for name, value in means.items():
            if "max" in name:
                largest[name] = max(largest[name], value)
            else:
                sums[name] += value * share
    step = engine.optimizer_step(max_grad_norm=grad_clip)
    if step.skipped:
        logger.warning("loss or gradient is not finite (grad norm {}): no weight is changed", step.grad_norm)
    return {**sums, **largest}, step
