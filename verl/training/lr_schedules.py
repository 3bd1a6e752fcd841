"""Learning-rate schedules: factors of the optimizer's initial rate."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.config.optimizer import WSD_DECAYS


def _schedule(
    optimizer: Optimizer, last_epoch: int, *, warmup: int, fall_from: int, end: int, start: float = 0.0,
    least: float = 1.0, cycles: float = 0.5, decay: str = "cosine",
) -> LambdaLR:  # fmt: skip
    """Linear from `start` to 1 over the warm-up, 1 until step `fall_from`, then a decay to `least` at step `end`.

    `cycles` counts the decay's periods of the cosine; 0.5 for the other decays.
    """
    for name, value in (("init_lr_ratio", start), ("min_lr_ratio", least)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}={value} must lie between 0 and 1")

    def factor(step: int) -> float:
        if step < warmup:
            return start + (1.0 - start) * step / warmup
        progress = min(1.0, max(0, step - fall_from) / max(1, end - fall_from))
        return least + (1.0 - least) * WSD_DECAYS[decay](2.0 * cycles * progress)

    return LambdaLR(optimizer, factor, last_epoch)


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    """Linear from 0 to 1 over the warm-up, then 1."""
    steps = num_warmup_steps
    return _schedule(optimizer, last_epoch, warmup=steps, fall_from=steps, end=steps)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5, last_epoch: int = -1, init_lr_ratio: float | None = None,
) -> LambdaLR:
    """Linear from `init_lr_ratio` (None: 0) to 1 over the warm-up, then a cosine down to `min_lr_ratio`."""
    steps = {"warmup": num_warmup_steps, "fall_from": num_warmup_steps, "end": num_training_steps}
    shape = {"start": init_lr_ratio or 0.0, "least": min_lr_ratio, "cycles": num_cycles}
    return _schedule(optimizer, last_epoch, **steps, **shape)


def get_wsd_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5, last_epoch: int = -1, stable_ratio: float = 0.9, decay: str = "cosine",
    decay_steps: int | None = None,
) -> LambdaLR:
    """Warm-up, stable, decay: 1 for `stable_ratio` of the steps after the warm-up, then a decay to `min_lr_ratio`.

    `decay` is a name of WSD_DECAYS; `decay_steps` gives its length in place of `stable_ratio`.
    """
    if not 0.0 <= stable_ratio <= 1.0:
        raise ValueError(f"stable_ratio={stable_ratio} must lie between 0 and 1")
    fall_from = num_warmup_steps + int(stable_ratio * max(0, num_training_steps - num_warmup_steps))
    if decay_steps is not None:
        fall_from = max(num_warmup_steps, num_training_steps - decay_steps)
    steps = {"warmup": num_warmup_steps, "fall_from": fall_from, "end": num_training_steps}
    shape = {"least": min_lr_ratio, "cycles": num_cycles if decay == "cosine" else 0.5, "decay": decay}
    return _schedule(optimizer, last_epoch, **steps, **shape)
