"""Compatibility with verl: import path of what composes and checks configs."""

from loguru import logger
from omegaconf import DictConfig

from verl.config.compose import forced_override, hydra_main, omega_conf_to_dataclass  # noqa: F401
from verl.config.ppo import PPOConfig
from verl.planning.config_check import find_problems
from verl.planning.config_effect import unused_settings
from verl.utils.problems import raise_if_any


def update_dict_with_config(dictionary: dict, config: DictConfig) -> None:
    """Overwrite the values of `dictionary`, in place, by those that `config` has under the same keys."""
    for key in dictionary:
        if key in config:
            dictionary[key] = config[key]


def validate_config(config: DictConfig, use_reference_policy: bool, use_critic: bool) -> None:
    """Raise one ConfigError (a ValueError) that lists all problems; warn of settings without effect."""
    raise_if_any(find_problems(config, use_reference_policy=use_reference_policy, use_critic=use_critic))
    for problem in unused_settings(config, PPOConfig):
        logger.warning("{}", problem.message)
