"""Passes over a rank's batch, the same for policy, value model and reward model: forward in order, or PPO updates."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from tensordict import TensorDict

from verl.algos.aggregation import StepCounts
from verl.config.actor import ActorConfig
from verl.config.critic import CriticConfig
from verl.profiling.profile import finished_update
from verl.protocol import DataProto
from verl.training.actor.batch_cuts import micro_batches, mini_batches, restore_order
from verl.training.engine import FSDPEngine
from verl.training.host_memory import return_freed_memory
from verl.training.policy.packing import to_device

#: (micro-batch, counts) -> (loss to differentiate, parts that add up over micro-batches, means over its counted tokens)
LossOf = Callable[[TensorDict, StepCounts], tuple[torch.Tensor, dict[str, float], dict[str, float]]]


@torch.no_grad()
def forward_in_order(
    engine: FSDPEngine, micros: Sequence[tuple[list[int], DataProto]], forward: Callable[[TensorDict], Sequence]
) -> list[torch.Tensor]:
    """The tensors [b, ...] that `forward` returns for each micro-batch, as [B, ...] in the batch's order on the CPU."""
    index, outputs = [], []
    with engine.eval_mode(), engine.autocast():
        for rows, micro in micros:
            index.append(rows)
            outputs.append(forward(to_device(micro.batch, engine.device)))
    # Read back after the loop: the host does not wait between micro-batches.
    return [restore_order([piece.cpu() for piece in pieces], index) for pieces in zip(*outputs, strict=True)]


def update_by_mini_batches(
    engine: FSDPEngine, config: ActorConfig | CriticConfig, data: DataProto, loss_of: LossOf, name: str,
    begin: Callable[[DataProto, int], DataProto] | None = None, **cut: Any,
) -> dict[str, list[float]]:  # fmt: skip
    """One optimizer step per mini-batch, `config.ppo_epochs` times over; lists in the metrics have one entry per step.

    An entry is this rank's share times the number of ranks: its mean over ranks is the value of the whole, and of names
    with "max" the maximum. `name` ("actor", "critic") begins metrics; `begin` is called with each mini-batch of this
    rank and its number first, and returns its rows that are read; `cut`: options of `micro_batches`.
    """
    metrics: dict[str, list[float]] = defaultdict(list)
    budget = config.ppo_max_token_len_per_gpu * engine.sequence_parallel_size if config.use_dynamic_bsz else None
    skipped = empty = 0
    minis = mini_batches(
        data, config.ppo_mini_batch_size, whole_groups=cut["whole_groups"], epochs=config.ppo_epochs,
        shuffle=config.shuffle, seed=config.data_loader_seed,
    )  # fmt: skip
    with engine.train_mode():
        for number, mini in enumerate(minis):
            mask = mini.batch["response_mask"]  # [b, R], 1 = counted
            sizes = torch.stack([mask.sum(), (mask.sum(-1) > 0).sum()]).to(engine.device)
            dist.all_reduce(sizes)
            counts = StepCounts(engine.get_data_parallel_size(), *(int(size) for size in sizes.tolist()))
            if counts.batch_num_tokens == 0:
                logger.warning("{}: skipping a mini-batch that has no counted token on any rank", name)
                empty += 1
                continue
            if begin is not None:
                mini = begin(mini, number)
            mini, _ = engine.gather_over_sequence_group(mini)
            micros = micro_batches(mini, rows=config.ppo_micro_batch_size_per_gpu, tokens=budget, **cut)
            values = _accumulate(engine, micros, loss_of, counts)
            step = engine.optimizer_step(config.optim.max_grad_norm(config.grad_clip))
            finished_update()
            skipped += step.skipped
            if step.skipped:
                logger.warning("loss or gradient is not finite (grad norm {}): no weight is changed", step.grad_norm)
            if math.isfinite(step.grad_norm):
                values[f"{name}/grad_norm"] = step.grad_norm
            for metric, value in values.items():
                metrics[metric].append(value)
            if engine.rank == 0:
                logger.debug("{} update on {} rows with {}: {}", name, len(mini), asdict(counts), values)
    if engine.device.type == "cpu":
        return_freed_memory()  # for generation and checkpoints, which follow
    metrics |= {f"{name}/nonfinite_steps": [skipped], f"{name}/empty_steps": [empty]}
    return dict(metrics)


def _accumulate(
    engine: FSDPEngine, micros: Sequence[tuple[Any, DataProto]], loss_of: LossOf, counts: StepCounts
) -> dict[str, float]:
    """Add up the gradients of a mini-batch's micro-batches; its metrics."""
    sums: dict[str, float] = defaultdict(float)
    largest: dict[str, float] = defaultdict(lambda: -math.inf)
    engine.optimizer_zero_grad()
    for number, (_, micro) in enumerate(micros):
        batch = to_device(micro.batch, engine.device)
        loss, additive, means = loss_of(batch, counts)
        engine.backward(loss, is_last_micro_batch=number == len(micros) - 1)
        del loss  # nodes of the graph would keep the CPU's allocator from joining freed activations for the next ones
        counted = micro.batch["response_mask"].sum().item()  # on the host: no wait for the backward pass
        share = counted * counts.dp_size / counts.batch_num_tokens
        for name, value in additive.items():
            sums[name] += value
        for name, value in means.items():
            if "max" in name:
                largest[name] = max(largest[name], value)
            else:
                sums[name] += value * share
    return {**sums, **largest}
