"""Compatibility with verl: the reward loop's view of the registry of reward managers."""

from verl.experimental.reward_loop.reward_manager.base import with_loop_constructor
from verl.reward.managers import AbstractRewardManager, RewardManagerBase, SampleRewardManager, registry
from verl.reward.managers.registry import REWARD_MANAGER_REGISTRY as REWARD_LOOP_MANAGER_REGISTRY

register = REWARD_LOOP_MANAGER_REGISTRY.register


def get_reward_manager_cls(name: str) -> type[RewardManagerBase]:
    """The class of that name, with the constructor of the reward loop; ValueError if there is none."""
    return loop_manager_class(registry.get_reward_manager_cls(name))


def loop_manager_class(manager: type[AbstractRewardManager]) -> type[RewardManagerBase]:
    """The class with the constructor of the reward loop; ValueError if it scores whole batches."""
    if not issubclass(manager, SampleRewardManager):
        raise ValueError(
            f"reward manager {manager.__name__} scores whole batches; the reward loop needs a subclass of "
            "RewardManagerBase, which scores single samples."
        )
    return manager if issubclass(manager, RewardManagerBase) else with_loop_constructor(manager)
