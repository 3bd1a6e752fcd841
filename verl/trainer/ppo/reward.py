"""Builds the reward manager of a configuration and scores batches with it."""

import inspect
from collections import Counter
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig

from verl.config.compose import omega_conf_to_dataclass
from verl.config.reward_model import RewardModelConfig
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls as get_loop_manager_cls
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.experimental.reward_loop.reward_model import RewardModelManager, ServedRewardManager
from verl.protocol import DataProto
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import load_extern_object
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.user_code import defined_at
from verl.workers.reward_manager import DAPORewardManager, NaiveRewardManager, get_reward_manager_cls
from verl.workers.reward_manager.abstract import AbstractRewardManager
from verl.workers.reward_manager.naive import ARGUMENTS
from verl.workers.reward_manager.reward_functions import get_custom_reward_fn, plain, rule_reward
from verl.workers.reward_manager.reward_rows import LOST


def get_manager_class(config: DictConfig) -> type[AbstractRewardManager]:
    """The class that `reward_manager.{source,name,module}` names."""
    loop = config.reward_model
    if loop.get("reward_loop_source") == "importlib":
        if loop.get("reward_loop_module_path") is None or loop.get("reward_loop_class_name") is None:
            keys = "reward_model.reward_loop_module_path and reward_model.reward_loop_class_name"
            raise ValueError(f"reward_model.reward_loop_source=importlib needs {keys}.")
        return load_extern_object(loop.reward_loop_module_path, loop.reward_loop_class_name)
    settings = config.reward_manager
    if settings.source == "register":
        return get_reward_manager_cls(settings.name)
    if settings.source != "importlib":
        raise ValueError(f"reward_manager.source={settings.source!r} is unknown. Known: register, importlib.")
    if settings.module.path is None:
        raise ValueError("reward_manager.source='importlib' needs reward_manager.module.path (and .name).")
    return load_extern_object(settings.module.path, settings.module.name or settings.name)


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
        what = f"custom_reward_function.name={config.custom_reward_function.name}: reward function "
        what += f"{defined_at(function)} {error}; reward manager {config.reward_manager.name} calls it with "
        raise TypeError(f"{what}{', '.join(ARGUMENTS)} as keywords.") from None


def load_reward_manager(config: DictConfig, tokenizer: Any, num_examine: int, **kwargs: Any) -> AbstractRewardManager:
    """The configured manager around the custom or the default reward function."""
    manager_cls = get_manager_class(config)
    reward_config = omega_conf_to_dataclass(config.reward_model, RewardModelConfig)
    is_ours = isinstance(manager_cls, type) and issubclass(manager_cls, NaiveRewardManager)
    workers = manager_cls.workers(reward_config) if is_ours else 1
    compute_score = get_custom_reward_fn(config) or rule_reward(reward_config, workers)
    buffer = config.reward_model.overlong_buffer
    if buffer is not None and "overlong_buffer_cfg" in inspect.signature(manager_cls).parameters:
        limits = {"max_resp_len": config.data.max_response_length, "overlong_buffer_cfg": plain(buffer)}
        kwargs = {**limits, **kwargs}
    elif buffer is not None and buffer.enable:
        raise ValueError(
            f"reward_model.overlong_buffer.enable=true, but reward manager {manager_cls.__name__} does not support it; "
            "set reward_model.reward_manager=dapo."
        )
    if issubclass(manager_cls, RewardManagerBase):
        return manager_cls(config=config, tokenizer=tokenizer, compute_score=compute_score)
    settings = {"num_examine": num_examine, "compute_score": compute_score, "reward_fn_key": config.data.reward_fn_key}
    manager = manager_cls(tokenizer=tokenizer, **settings, **kwargs)
    if is_ours:
        manager.config = reward_config
    return manager


def load_served_reward(config: DictConfig, tokenizer: Any, rm_group: Any) -> RewardManagerBase:
    """The manager that scores with the reward model which the ranks of `rm_group` (RewardServerWorker) serve.

    Without a custom reward function the model is a discriminative one. A custom function gets the address and the
    reward model's tokenizer as `reward_router_address` and `reward_model_tokenizer`, from the reward loop's manager of
    the configured name.
    """
    model = config.reward_model.model
    path = copy_to_local(model.tokenizer_path or model.path)
    reward_model_tokenizer = hf_tokenizer(path, trust_remote_code=model.trust_remote_code)
    custom = get_custom_reward_fn(config)
    if custom is None:
        manager = ServedRewardManager
    elif config.reward_model.reward_loop_source == "importlib":
        manager = get_manager_class(config)
    else:
        manager = get_loop_manager_cls(config.reward_manager.name)
    address = RewardModelManager(config.reward_model, rm_group).get_router_address()
    return manager(
        config=config, tokenizer=tokenizer, compute_score=custom, reward_router_address=address,
        reward_model_tokenizer=reward_model_tokenizer,
    )  # fmt: skip


def compute_reward(data: DataProto, reward_fn: AbstractRewardManager) -> tuple[torch.Tensor, dict[str, Any]]:
    """Token-level scores [B, R] float32 and extras {name: list of B values}. Errors are not caught.

    With `reward_model.error=drop` an extra `__lost__` marks rows without a score: see `drop_failed`.
    """
    result = reward_fn(data, return_dict=True)
    return result["reward_tensor"], result["reward_extra_info"]


def drop_failed(
    data: DataProto, scores: torch.Tensor, extras: dict[str, Any]
) -> tuple[DataProto, torch.Tensor, dict[str, Any], Counter[str]]:
    """The batch, scores [B', R] and extras without the rows that have no score, and the number of failures by kind."""
    extras = dict(extras)
    if LOST not in extras:
        return data, scores, extras, Counter()
    how = extras.pop(LOST)
    kept = [i for i, kind in enumerate(how) if not kind]
    extras = {key: [values[i] for i in kept] for key, values in extras.items()}
    return data.select_idxs(np.array(kept, dtype=np.int64)), scores[kept], extras, Counter(filter(None, how))


@ray.remote(num_cpus=1)
def compute_reward_async(
    data: DataProto, config: DictConfig | None = None, tokenizer: Any = None, reward_fn: AbstractRewardManager = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """`compute_reward` as a Ray task; without `reward_fn` the manager is built from `config` and `tokenizer`."""
    if reward_fn is None:
        if config is None or tokenizer is None:
            raise ValueError("compute_reward_async needs `reward_fn`, or both `config` and `tokenizer`.")
        kwargs = plain(config.reward_model.get("reward_kwargs"))
        reward_fn = load_reward_manager(config, tokenizer, num_examine=0, **kwargs)
    return compute_reward(data, reward_fn)
