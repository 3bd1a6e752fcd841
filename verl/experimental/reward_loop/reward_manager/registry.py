"""The table of the reward loop's managers."""

from collections.abc import Callable

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.utils.registry import Registry

REWARD_LOOP_MANAGER_REGISTRY: Registry[str, type[RewardManagerBase]] = Registry(
    "reward_model.reward_manager", "Your own: register it, or name it by reward_model.reward_loop_source=importlib."
)


def register(name: str) -> Callable[[type[RewardManagerBase]], type[RewardManagerBase]]:
    """Decorator that enters a class under `name`."""
    return REWARD_LOOP_MANAGER_REGISTRY.register(name)


def get_reward_manager_cls(name: str) -> type[RewardManagerBase]:
    """The class of that name; ValueError with the nearest name if there is none."""
    return REWARD_LOOP_MANAGER_REGISTRY.find(name)
