"""Builds the reward function and the reward manager of a configuration."""

import inspect
import json
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.config.common import RewardManagerConfig
from verl.config.compose import omega_conf_to_dataclass
from verl.config.reward_model import RewardModelConfig
from verl.reward.managers import (
    AbstractRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    RawRewardFn,
    RewardManagerBase,
    SampleRewardManager,
    get_reward_manager_cls,
)
from verl.reward.managers.naive import ARGUMENTS
from verl.reward.pool import ExternFunction, Slots
from verl.reward.served import ServedRewardManager
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import load_extern_object
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.user_code import defined_at

# Passed by keyword to a constructor that does not take the full config, besides reward_model.reward_kwargs.
MANAGER_ARGUMENTS = ("tokenizer", "num_examine", "compute_score", "reward_fn_key")
ENVIRONMENTS = "pkg://verl.agents.environments.hosting"  # imported where data.environment is used


def to_dict(mapping: Any) -> dict[str, Any]:
    """A plain dict of a config mapping that may be None."""
    return OmegaConf.to_container(mapping, resolve=True) if OmegaConf.is_config(mapping) else dict(mapping or {})


def get_custom_reward_fn(config: DictConfig) -> RawRewardFn | None:
    """The function named by `custom_reward_function.{path,name}`, with its `reward_kwargs` bound.

    It may be a coroutine function. `reward_kwargs` win over what the caller passes. Without a path it is that of
    data.environment, or None.
    """
    settings = config.custom_reward_function
    if settings.path is None:
        environment = to_dict(config.data.get("environment"))
        if environment.get("name") is None:
            return None
        environment.pop("_target_", None)
        return ExternFunction(ENVIRONMENTS, "compute_score", {"environment": json.dumps(environment)})
    function = ExternFunction(settings.path, settings.name, to_dict(settings.get("reward_kwargs")))
    if not callable(function.function):
        name, value = settings.name, function.function
        raise TypeError(f"custom_reward_function.name={name} in {settings.path} is {value!r}; name a function.")
    return function


def rule_reward(settings: RewardModelConfig, workers: int) -> RawRewardFn:
    """`default_compute_score` with the configured sandboxes; the workers share the service's slots."""
    service = settings.sandbox_fusion
    bound = {
        "sandbox_fusion_url": service.url, "memory_limit_mb": service.memory_limit_mb, "sandbox": settings.sandbox,
        "concurrent_semaphore": Slots(max(1, service.max_concurrent // max(1, workers))),
    }  # fmt: skip
    return ExternFunction("pkg://verl.reward.rules", "default_compute_score", bound)


def get_manager_class(config: DictConfig) -> type[AbstractRewardManager]:
    """The class that `reward_manager.{source,name,module}` or `reward_model.reward_loop_source=importlib` names."""
    loop = config.reward_model  # verl's other way to name a manager
    if loop.reward_loop_source == "importlib":
        if loop.reward_loop_module_path is None or loop.reward_loop_class_name is None:
            keys = "reward_model.reward_loop_module_path and reward_model.reward_loop_class_name"
            raise ValueError(f"reward_model.reward_loop_source=importlib needs {keys}.")
        return load_extern_object(loop.reward_loop_module_path, loop.reward_loop_class_name)
    settings = omega_conf_to_dataclass(config.reward_manager, RewardManagerConfig)
    if settings.source == "register":
        return get_reward_manager_cls(settings.name)
    return load_extern_object(settings.module.path, settings.module.name or settings.name)


def check_manager_arguments(config: DictConfig) -> None:
    """Raise TypeError if the manager's constructor does not take what `build_manager` passes to it."""
    manager = get_manager_class(config)
    if issubclass(manager, RewardManagerBase):
        return
    kwargs = to_dict(config.reward_model.reward_kwargs)
    try:
        inspect.signature(manager).bind_partial(**dict.fromkeys((*MANAGER_ARGUMENTS, *kwargs)))
    except TypeError as error:
        named = ", ".join(inspect.signature(manager).parameters)
        raise TypeError(
            f"reward_model.reward_kwargs={kwargs}: reward manager {manager.__name__} {error}; it takes {named}."
        ) from None


def check_reward_arguments(config: DictConfig) -> None:
    """Raise TypeError if the user's function does not take what a manager that scores row by row passes to it."""
    function, manager = get_custom_reward_fn(config), get_manager_class(config)
    if function is None or manager not in (NaiveRewardManager, DAPORewardManager):
        return
    try:
        inspect.signature(function).bind_partial(**dict.fromkeys(ARGUMENTS))
    except ValueError:  # a function without a signature
        return
    except TypeError as error:
        raise TypeError(
            f"custom_reward_function.name={config.custom_reward_function.name}: reward function {defined_at(function)} "
            f"{error}; reward manager {config.reward_manager.name} calls it with {', '.join(ARGUMENTS)} as keywords."
        ) from None


def load_reward_manager(config: DictConfig, tokenizer: Any, num_examine: int, **kwargs: Any) -> AbstractRewardManager:
    """The configured manager around the custom or the default reward function.

    `kwargs` are those of the manager's constructor (`reward_model.reward_kwargs`).
    """
    manager_cls = get_manager_class(config)
    compute_score = get_custom_reward_fn(config)
    if compute_score is None:
        settings = omega_conf_to_dataclass(config.reward_model, RewardModelConfig)
        workers = manager_cls.workers(settings) if issubclass(manager_cls, SampleRewardManager) else 1
        compute_score = rule_reward(settings, workers)
    return build_manager(manager_cls, config, tokenizer, compute_score, num_examine, kwargs)


def load_served_reward(config: DictConfig, tokenizer: Any, address: str | None) -> SampleRewardManager:
    """The manager that scores with the reward model that is served at `address`, host:port.

    Without a custom reward function the model is a discriminative one. A custom function gets the address and the
    reward model's tokenizer as `reward_router_address` and `reward_model_tokenizer` from the configured manager.
    """
    settings = omega_conf_to_dataclass(config.reward_model, RewardModelConfig)
    compute_score = get_custom_reward_fn(config)
    manager_cls = ServedRewardManager if compute_score is None else get_manager_class(config)
    if not issubclass(manager_cls, SampleRewardManager):
        raise ValueError(
            f"reward manager {manager_cls.__name__} cannot pass the address of the served reward model "
            "(reward_model.rollout.name) to the reward function; set reward_manager.source=register and "
            "reward_manager.name to naive, dapo, rate_limited or remote, or derive the class from "
            "verl.reward.managers.RewardManagerBase."
        )
    path = copy_to_local(settings.model.tokenizer_path or settings.model.path)
    model_tokenizer = hf_tokenizer(path, trust_remote_code=settings.model.trust_remote_code)
    if compute_score is None:
        return ServedRewardManager(tokenizer, settings, address, model_tokenizer, config.data.reward_fn_key)
    served = {"reward_router_address": address, "reward_model_tokenizer": model_tokenizer}
    manager = build_manager(manager_cls, config, tokenizer, compute_score, 0, settings.reward_kwargs, **served)
    manager.concurrent = True  # the function waits for the server
    return manager


def build_manager(
    manager_cls: type[AbstractRewardManager], config: DictConfig, tokenizer: Any, compute_score: RawRewardFn,
    num_examine: int, kwargs: dict[str, Any], **served: Any,
) -> AbstractRewardManager:  # fmt: skip
    """A manager of the class; `kwargs` go to its constructor, unless that takes the full config, `served` always."""
    settings = omega_conf_to_dataclass(config.reward_model, RewardModelConfig)
    buffer, taken = settings.overlong_buffer, inspect.signature(manager_cls).parameters
    if buffer is not None and "overlong_buffer_cfg" in taken:
        length = {"max_resp_len": config.data.max_response_length} if "max_resp_len" in taken else {}
        kwargs = {**length, "overlong_buffer_cfg": buffer, **kwargs}
    elif buffer is not None and buffer["enable"]:
        raise ValueError(
            f"reward_model.overlong_buffer.enable=true does not work with reward manager {manager_cls.__name__}. Set "
            "reward_manager.name=dapo and reward_manager.source=register, or reward_model.overlong_buffer.enable=false."
        )
    if issubclass(manager_cls, RewardManagerBase):
        return manager_cls(config=config, tokenizer=tokenizer, compute_score=compute_score, **served)
    manager = manager_cls(
        tokenizer=tokenizer, num_examine=num_examine, compute_score=compute_score,
        reward_fn_key=config.data.reward_fn_key, **kwargs, **served,
    )  # fmt: skip
    if isinstance(manager, SampleRewardManager):
        manager.settings = settings
    return manager
