"""Compatibility with verl: import path of what composes and checks configs."""
# ruff: noqa: F401

from verl.config.compose import forced_override, hydra_main, omega_conf_to_dataclass, update_dict_with_config
from verl.planning.config_effect import validate_config
