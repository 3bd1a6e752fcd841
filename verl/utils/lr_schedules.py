"""Learning-rate schedules as factors of the optimizer's own rate."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def _warmup(step: int, num_warmup_steps: int, start: float = 0.0) -> float:
    return start + (1.0 - start) * step / max(1, num_warmup_steps)


def _cosine(progress: float, num_cycles: float, least: float) -> float:
    """From 1 at progress 0 to `least` at progress 1 (half a cycle)."""
    wave = 0.5 * (1.0 + math.cos(2.0 * math.pi * num_cycles * progress))
    return least + (1.0 - least) * wave


def _check_ratio(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}={value} must lie between 0 and 1")


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    """Linear from 0 to 1 over the warm-up, then 1."""
    return LambdaLR(optimizer, lambda step: min(1.0, _warmup(step, num_warmup_steps)) if num_warmup_steps > 0 else 1.0,
                    last_epoch)  # fmt: skip


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    init_lr_ratio: float | None = None,
) -> LambdaLR:
    """Linear from `init_lr_ratio` (None: 0) to 1 over the warm-up, then a cosine down to `min_lr_ratio`."""
    start = 0.0 if init_lr_ratio is None else init_lr_ratio
    _check_ratio("min_lr_ratio", min_lr_ratio)
    _check_ratio("init_lr_ratio", start)

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return _warmup(step, num_warmup_steps, start)
        progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        return _cosine(min(1.0, progress), num_cycles, min_lr_ratio)

    return LambdaLR(optimizer, factor, last_epoch)


def get_wsd_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    stable_ratio: float = 0.9,
) -> LambdaLR:
    """Warm-up, stable, decay: 1 for `stable_ratio` of the steps after the warm-up, then a cosine to `min_lr_ratio`."""
    _check_ratio("min_lr_ratio", min_lr_ratio)
    _check_ratio("stable_ratio", stable_ratio)
    rest = max(0, num_training_steps - num_warmup_steps)
    decay_start = num_warmup_steps + int(stable_ratio * rest)

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return _warmup(step, num_warmup_steps)
        if step < decay_start:
            return 1.0
        progress = (step - decay_start) / max(1, num_training_steps - decay_start)
        return _cosine(min(1.0, progress), num_cycles, min_lr_ratio)

    return LambdaLR(optimizer, factor, last_epoch)
