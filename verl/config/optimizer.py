"""Settings of the optimizer with its schedule, and the optimizer they name."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.config.base import BaseConfig
from verl.config.fields import setting
from verl.utils.registry import nearest

if TYPE_CHECKING:
    import torch

SCHEDULES = ("constant", "cosine", "linear", "wsd")
# Decays of Megatron's WSD schedule: the progress from 0 to 1 -> the factor from 1 to 0.
WSD_DECAYS = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
    "linear": lambda progress: 1.0 - progress,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


@dataclass
class OptimizerConfig(BaseConfig, section="optim"):
    """Learning rate, its warm-up and decay, weight decay, clipping of the gradient's norm."""

    lr: float = setting(0.001, "Learning rate after warm-up.", low=0)
    lr_warmup_steps_ratio: float = setting(
        0.0, "Warm-up as a share of all steps, without lr_warmup_steps.", low=0, high=1
    )
    total_training_steps: int = setting(-1, "Steps of the schedule; -1 is filled in by the trainer.", low=-1)
    weight_decay: float = setting(0.01, "Weight decay.", low=0)
    lr_warmup_steps: int | None = setting(-1, "Warm-up steps; negative uses lr_warmup_steps_ratio.")
    betas: tuple[float, float] = setting((0.9, 0.999), "Decay rates of the optimizer's moments.")
    clip_grad: float | None = setting(None, "Maximum gradient norm; null: grad_clip of the role.", above=0)
    optimizer: str = "adamw"
    lr_scheduler_type: str = setting("constant", "Schedule after warm-up.", choices=SCHEDULES)
    override_optimizer_config: dict | None = setting(None, "Further keyword arguments of the optimizer; any key.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"optim.betas={list(self.betas)} must be two numbers in [0, 1), such as [0.9, 0.999].")
        object.__setattr__(self, "betas", tuple(self.betas))

    def max_grad_norm(self, of_role: float = 1.0) -> float:
        """`clip_grad` where it is set, else the role's key grad_clip."""
        return of_role if self.clip_grad is None else self.clip_grad


@dataclass
class FSDPOptimizerConfig(OptimizerConfig):
    """OptimizerConfig for a class of any module: `optimizer_impl` names the module, `optimizer` the class."""

    optimizer: str = setting("AdamW", "Class of the optimizer in optimizer_impl.")
    optimizer_impl: str = setting("torch.optim", "Module of the optimizer's class.")
    min_lr_ratio: float | None = setting(
        None, "Final learning rate of cosine and wsd as a share of lr; null means 0.", low=0, high=1
    )
    num_cycles: float = setting(0.5, "Cycles of the cosine, with wsd of its decay; 0.5 decays once.", above=0)
    lr_wsd_decay_style: str = setting("cosine", choices=tuple(WSD_DECAYS))
    lr_wsd_decay_steps: int | None = setting(None, low=1)


def build_optimizer(
    parameters: Iterable[Any], config: FSDPOptimizerConfig, **options: Any
) -> torch.optim.Optimizer:
    """The optimizer that the config names, over the parameters that require a gradient.

    `parameters`: tensors, or (name, tensor) pairs. A class whose first argument is called `named_parameters` gets the
    pairs, others the tensors. `betas` and `options` go to optimizers that take them; override_optimizer_config is
    passed on as keyword arguments.
    """
    try:
        module = importlib.import_module(config.optimizer_impl)
    except ImportError as e:
        name = f"optim.optimizer_impl={config.optimizer_impl!r}"
        text = f"{name} cannot be imported ({e}); install it, or set optimizer_impl=torch.optim and optimizer=AdamW."
        raise ImportError(text) from e
    if config.optimizer not in vars(module):
        near = nearest(config.optimizer, [n for n in vars(module) if n[:1].isupper()]) or "."
        unknown = f"optim.optimizer={config.optimizer!r} is not in {config.optimizer_impl}{near} Name a class of it"
        raise ValueError(f"{unknown}, or set optimizer_impl=torch.optim and optimizer=AdamW.")
    optimizer_class = vars(module)[config.optimizer]
    kwargs: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    takes = list(inspect.signature(optimizer_class).parameters)
    kwargs |= {name: value for name, value in {"betas": config.betas, **options}.items() if name in takes}
    kwargs.update(config.override_optimizer_config or {})
    pairs = [item if isinstance(item, tuple) else (str(i), item) for i, item in enumerate(parameters)]
    trained = [(name, p) for name, p in pairs if p.requires_grad]
    if not trained:
        raise ValueError("No parameter requires a gradient, so there is nothing to optimize; check what is frozen.")
    return optimizer_class(trained if takes[0] == "named_parameters" else [p for _, p in trained], **kwargs)
