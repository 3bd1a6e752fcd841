"""Compatibility with verl: import path of what composes and checks configs."""

from omegaconf import DictConfig

from verl.config.compose import forced_override, hydra_main, omega_conf_to_dataclass  # noqa: F401
from verl.planning.config_effect import validate_config  # noqa: F401


def update_dict_with_config(dictionary: dict, config: DictConfig) -> None:
    """Overwrite the values of `dictionary`, in place, by those that `config` has under the same keys."""
    for key in dictionary:
        if key in config:
            dictionary[key] = config[key]
