"""Compatibility with verl: single functions under old import paths, which `verl.compat.table` maps to this module."""

import os
from dataclasses import dataclass
from typing import Any

from loguru import logger
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.tool_registry import initialize_tools_from_config
from verl.algos import rollout_correction
from verl.config.ppo import PPOConfig
from verl.data.chat_template import render_chat
from verl.planning.config_check import find_problems, tree_problems
from verl.protocol import DataProto
from verl.trainer.run.ray_session import WORKER_ENV
from verl.utils.problems import raise_if_any

#: Our default of each variable, whether or not it is set already; scripts for verl read or extend it.
PPO_RAY_RUNTIME_ENV: dict[str, Any] = {"env_vars": dict(WORKER_ENV)}


def get_ppo_ray_runtime_env() -> dict[str, Any]:
    """The `runtime_env` of `ray.init`: our default of each variable that the environment of this process lacks."""
    return {"env_vars": {name: value for name, value in WORKER_ENV.items() if name not in os.environ}}


def apply_bypass_mode(batch: DataProto, rollout_corr_config: Any = None, policy_loss_config: Any = None) -> None:
    """`verl.algos.rollout_correction.apply_bypass_mode`; with both sections it also sets the loss of the second."""
    rollout_correction.apply_bypass_mode(batch)
    if policy_loss_config is not None and rollout_corr_config is not None:
        policy_loss_config.loss_mode = "bypass_mode"
        policy_loss_config.rollout_correction = rollout_corr_config


def load_all_tools(tool_config_path: str | None, function_tool_path: str | None) -> list[BaseTool]:
    """The tools of a yaml file, then those of a Python file; either may be None."""
    return initialize_tools_from_config(tool_config_path, function_tool_path)


def update_dict_with_config(dictionary: dict, config: DictConfig) -> None:
    """Overwrite the values of `dictionary`, in place, with those that `config` has under the same keys."""
    dictionary.update({key: config[key] for key in dictionary if key in config})


def validate_config(config: DictConfig, use_reference_policy: bool, use_critic: bool) -> None:
    """Raise one ConfigError (a ValueError) that lists all problems; warn of settings without effect."""
    raise_if_any(find_problems(config, use_reference_policy=use_reference_policy, use_critic=use_critic))
    _, _, without_effect = tree_problems(config, PPOConfig)
    for problem in without_effect:
        logger.warning("{}", problem.message)


@dataclass
class RouterReplayConfig:
    """verl's settings for replaying the choices of an expert router. Only `mode="disabled"` is accepted."""

    mode: str = "disabled"
    record_file: str | None = None
    replay_file: str | None = None

    def __post_init__(self) -> None:
        if self.mode != "disabled":
            raise ValueError(f"RouterReplayConfig.mode={self.mode!r}: the routers of experts are not replayed.")


def initialize_system_prompt(tokenizer: PreTrainedTokenizerBase, **apply_chat_template_kwargs: Any) -> list[int]:
    """The ids that the template puts in front of a conversation without a system message; [] for none.

    In front of the first question stand this system prompt and the header of a user's turn. After an answer stands its
    end, and before another question the header too: what follows an answer with and without one tells the header.
    """
    question, answer = "question-7f3a", "answer-7f3a"  # in no template
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    once, twice = (render_chat(tokenizer, turns * n, **apply_chat_template_kwargs) for n in (1, 2))
    prompt_and_header = tokenizer.encode(once.partition(question)[0], add_special_tokens=False)
    end_and_header = tokenizer.encode(twice.split(answer)[1].partition(question)[0], add_special_tokens=False)
    end = tokenizer.encode(once.rpartition(answer)[2], add_special_tokens=False)
    header = end_and_header[len(os.path.commonprefix([end_and_header, end])) :]  # it works on lists as well
    at_the_end = os.path.commonprefix([prompt_and_header[::-1], header[::-1]])
    return prompt_and_header[: len(prompt_and_header) - len(at_the_end)]


def extract_system_prompt_and_generation(
    tokenizer: PreTrainedTokenizerBase, **apply_chat_template_kwargs: Any
) -> tuple[list[int], list[int]]:
    """The ids of `initialize_system_prompt`, and those that `add_generation_prompt` adds to a user's turn."""
    turn, prompting = [{"role": "user", "content": ""}], {**apply_chat_template_kwargs, "add_generation_prompt": True}
    without = tokenizer.encode(render_chat(tokenizer, turn, **apply_chat_template_kwargs), add_special_tokens=False)
    prompted = tokenizer.encode(render_chat(tokenizer, turn, **prompting), add_special_tokens=False)
    return initialize_system_prompt(tokenizer, **apply_chat_template_kwargs), prompted[len(without) :]
