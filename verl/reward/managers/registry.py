"""The names of the reward managers."""

from verl.reward.managers.base import AbstractRewardManager
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.registry import Registry

REWARD_MANAGER_REGISTRY: Registry[str, type[AbstractRewardManager] | str] = Registry(
    "reward_manager.name",
    "Your own: set reward_manager.source=importlib and reward_manager.module.{path,name}, or register it in a module "
    "named by actor_rollout_ref.model.external_lib.",
)
REWARD_MANAGER_REGISTRY["batch"] = "verl.reward.managers.batch.BatchRewardManager"  # imported when it is used
# Decorator: enter a manager, of batches or of single samples, under a name; a second one of that name is refused.
register = REWARD_MANAGER_REGISTRY.register


def get_reward_manager_cls(name: str) -> type[AbstractRewardManager]:
    """What was registered under that name, imported where that is a dotted path; ValueError if there is nothing."""
    manager = REWARD_MANAGER_REGISTRY.find(name)
    dotted = isinstance(manager, str) and "." in manager
    return load_class_from_fqn(manager, "reward manager") if dotted else manager
