"""The reward function of a configuration: the user's own, or the rule rewards."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.config.reward_model import RewardModelConfig
from verl.reward.pool import ExternFunction, Slots
from verl.workers.reward_manager.abstract import RawRewardFn


def plain(mapping: Any) -> dict[str, Any]:
    """A plain dict of a config mapping that may be None."""
    return OmegaConf.to_container(mapping, resolve=True) if OmegaConf.is_config(mapping) else dict(mapping or {})


def get_custom_reward_fn(config: DictConfig) -> RawRewardFn | None:
    """The function named by `custom_reward_function.{path,name}`, with its `reward_kwargs` bound; None without a path.

    It may be a coroutine function. `reward_kwargs` win over what the caller passes.
    """
    settings = config.custom_reward_function
    if settings.path is None:
        return None
    function = ExternFunction(settings.path, settings.name, plain(settings.get("reward_kwargs")))
    if not callable(function.function):
        problem = f"custom_reward_function.name={settings.name} in {settings.path} is {function.function!r}"
        raise TypeError(f"{problem}; name a function.")
    return function


def rule_reward(settings: RewardModelConfig, workers: int) -> RawRewardFn:
    """`default_compute_score` with the configured sandboxes; the workers share the service's slots."""
    service = settings.sandbox_fusion
    bound = {
        "sandbox_fusion_url": service.url, "memory_limit_mb": service.memory_limit_mb, "sandbox": settings.sandbox,
        "concurrent_semaphore": Slots(max(1, service.max_concurrent // max(1, workers))),
    }  # fmt: skip
    return ExternFunction("pkg://verl.reward.rules", "default_compute_score", bound)
