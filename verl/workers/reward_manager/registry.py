"""The names of the reward managers."""

from __future__ import annotations

from collections.abc import Callable

from verl.utils.registry import Registry
from verl.workers.reward_manager.abstract import AbstractRewardManager

_MANAGERS: Registry[type[AbstractRewardManager]] = Registry(
    "reward_manager.name",
    "Your own: set reward_manager.source=importlib and reward_manager.module.{path,name}, or register it in a module "
    "named by actor_rollout_ref.model.external_lib.",
)


def register(name: str) -> Callable[[type[AbstractRewardManager]], type[AbstractRewardManager]]:
    """Decorator: enter a reward manager under `name`; a second one of that name is refused."""
    return _MANAGERS.register(name)


def get_reward_manager_cls(name: str) -> type[AbstractRewardManager]:
    """The manager of that name; an unknown name is an error with the nearest."""
    return _MANAGERS.get(name)
