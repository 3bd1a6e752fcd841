"""Compatibility with verl: small functions of several modules of verl; the table has the module of each."""

import gc
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from loguru import logger
from omegaconf import DictConfig

from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.tool_registry import initialize_tools_from_config
from verl.algos import rollout_correction
from verl.config.ppo import PPOConfig
from verl.planning.config_check import find_problems, tree_problems
from verl.profiling.performance import GIB
from verl.protocol import DataProto
from verl.trainer.run.ray_session import WORKER_ENV
from verl.utils.problems import raise_if_any

PPO_RAY_RUNTIME_ENV: dict[str, Any] = {"env_vars": dict(WORKER_ENV)}


def get_ppo_ray_runtime_env() -> dict[str, Any]:
    """The `runtime_env` of `ray.init`: variables that the driver sets itself are left to it."""
    return {"env_vars": {name: value for name, value in WORKER_ENV.items() if name not in os.environ}}


def apply_bypass_mode(batch: DataProto, rollout_corr_config: Any = None, policy_loss_config: Any = None) -> None:
    """As verl.algos.rollout_correction.apply_bypass_mode; also lets the loss of an actor.policy_loss section, which is
    changed in place, correct for the rollout."""
    rollout_correction.apply_bypass_mode(batch)
    if policy_loss_config is not None and rollout_corr_config is not None:
        policy_loss_config.loss_mode = "bypass_mode"
        policy_loss_config.rollout_correction = rollout_corr_config


def load_all_tools(tool_config_path: str | None, function_tool_path: str | None) -> list[BaseTool]:
    """The tools of a yaml file, then those of a Python file; either may be None."""
    return initialize_tools_from_config(tool_config_path, function_tool_path)


def update_dict_with_config(dictionary: dict, config: DictConfig) -> None:
    """Overwrite the values of `dictionary`, in place, by those that `config` has under the same keys."""
    for key in dictionary:
        if key in config:
            dictionary[key] = config[key]


def validate_config(config: DictConfig, use_reference_policy: bool, use_critic: bool) -> None:
    """Raise one ConfigError (a ValueError) that lists all problems; warn of settings without effect."""
    raise_if_any(find_problems(config, use_reference_policy=use_reference_policy, use_critic=use_critic))
    for problem in tree_problems(config, PPOConfig)[2]:
        logger.warning("{}", problem.message)


def convert_nested_value_to_list_recursive(data_item: Any) -> Any:
    """Nested arrays, as parquet readers return them, to plain lists and dicts."""
    if isinstance(data_item, dict):
        return {key: convert_nested_value_to_list_recursive(value) for key, value in data_item.items()}
    if isinstance(data_item, list | tuple | np.ndarray):
        return [convert_nested_value_to_list_recursive(value) for value in data_item]
    return data_item.item() if isinstance(data_item, np.generic) else data_item


def get_reverse_idx(idx_map: list[int]) -> list[int]:
    """Inverse of a permutation."""
    return sorted(range(len(idx_map)), key=lambda position: idx_map[position])


def restore_dynamic_batch(data: torch.Tensor, batch_idx_list: list[list[int]]) -> torch.Tensor:
    """Rows that were joined micro-batch after micro-batch, [B, ...], back in the order they had before the cut."""
    order = [i for part in batch_idx_list for i in part]
    if len(order) != data.shape[0]:
        raise ValueError(f"{data.shape[0]} rows cannot be restored by {len(order)} row numbers")
    return data[torch.tensor(get_reverse_idx(order), device=data.device)]


def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 3) -> None:
    """Collect garbage and return cached CUDA memory, again while that frees more than 1 GiB."""
    for _ in range(max_retries):
        before = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
        gc.collect()
        if not before:
            return
        torch.cuda.empty_cache()
        if force_sync:
            torch.cuda.synchronize()
        if before - torch.cuda.memory_reserved() < GIB:
            return


@dataclass
class RouterReplayConfig:
    """What verl replays of the routers of experts: nothing, here."""

    mode: str = "disabled"
    record_file: str | None = None
    replay_file: str | None = None

    def __post_init__(self) -> None:
        if self.mode != "disabled":
            raise ValueError(f"RouterReplayConfig.mode={self.mode!r}: the routers of experts are not replayed.")
