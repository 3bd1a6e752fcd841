"""The names of the reward managers."""

from verl.utils.registry import Registry
from verl.workers.reward_manager.abstract import AbstractRewardManager

REWARD_MANAGER_REGISTRY: Registry[str, type[AbstractRewardManager]] = Registry(
    "reward_manager.name",
    "Your own: set reward_manager.source=importlib and reward_manager.module.{path,name}, or register it in a module "
    "named by actor_rollout_ref.model.external_lib.",
)
# Decorator: enter a reward manager under a name; a second one of that name is refused.
register = REWARD_MANAGER_REGISTRY.register
get_reward_manager_cls = REWARD_MANAGER_REGISTRY.find
