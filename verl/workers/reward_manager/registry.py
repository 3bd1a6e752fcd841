"""The names of the reward managers."""

from verl.utils.import_utils import load_class_from_fqn
from verl.utils.registry import Registry
from verl.workers.reward_manager.abstract import AbstractRewardManager

REWARD_MANAGER_REGISTRY: Registry[str, type[AbstractRewardManager] | str] = Registry(
    "reward_manager.name",
    "Your own: set reward_manager.source=importlib and reward_manager.module.{path,name}, or register it in a module "
    "named by actor_rollout_ref.model.external_lib.",
)
# Those of the reward loop are imported when they are requested: the loop is built on this package.
REWARD_MANAGER_REGISTRY |= {
    "rate_limited": "verl.experimental.reward_loop.reward_manager.limited.RateLimitedRewardManager",
    "remote": "verl.experimental.reward_loop.reward_manager.remote.RemoteRewardManager",
}
# Decorator: enter a reward manager under a name; a second one of that name is refused.
register = REWARD_MANAGER_REGISTRY.register


def get_reward_manager_cls(name: str) -> type[AbstractRewardManager]:
    """The class of that name; ValueError with the nearest name if there is none."""
    manager = REWARD_MANAGER_REGISTRY.find(name)
    return load_class_from_fqn(manager, "reward manager") if isinstance(manager, str) else manager
