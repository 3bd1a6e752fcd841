"""From a composed config to dataclasses, and the check that stops a run before any worker starts."""

import functools
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from loguru import logger
from omegaconf import DictConfig, ListConfig, OmegaConf

from verl.utils.import_utils import load_class_from_fqn


def omega_conf_to_dataclass(config: Any, dataclass_type: type[Any] | None = None) -> Any:
    """The dataclass that a config node describes.

    Without a type the node names it in `_target_`. With one the node is merged over the defaults of that type, or of
    its subclass in `_target_`: unknown keys are refused. An empty node gives the defaults (None without a type); an
    object that is not a config is returned as it is.
    """
    if config is None or (isinstance(config, Mapping | ListConfig) and len(config) == 0):
        return None if dataclass_type is None else dataclass_type()
    if not isinstance(config, DictConfig | ListConfig | dict | list):
        return config
    if dataclass_type is None:
        from hydra.utils import instantiate

        if "_target_" not in config:
            known = f"The config node with keys {list(config)} names no dataclass"
            raise AssertionError(f"{known}; add _target_ or pass dataclass_type.")
        return instantiate(config, _convert_="partial")
    node = config if isinstance(config, DictConfig | ListConfig) else OmegaConf.create(config)
    plain = OmegaConf.to_container(node, resolve=True)  # interpolations may point above the node
    if isinstance(plain, dict) and isinstance(target := plain.get("_target_"), str):
        named = load_class_from_fqn(target, "config dataclass")
        dataclass_type = named if issubclass(named, dataclass_type) else dataclass_type
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(dataclass_type), plain))


def hydra_main(
    config_path: str, config_name: str, groups: bool = True
) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """hydra.main for entries that check keys themselves.

    Hydra refuses `a.b=1` where b is unknown, without saying which key is near, and takes any `+a.b=1`. Here both reach
    `find_problems`, which refuses both and names the nearest. `groups=False`: the tree has none, so that a name
    without a dot is a key too.
    """

    def decorate(task: Callable[[DictConfig], None]) -> Callable[[], None]:
        import hydra

        run = hydra.main(config_path=config_path, config_name=config_name, version_base=None)(task)

        @functools.wraps(task)
        def main() -> None:
            sys.argv[1:] = [forced_override(argument, groups) for argument in sys.argv[1:]]
            if "LOGURU_LEVEL" not in os.environ:  # loguru's own default is DEBUG
                os.environ["LOGURU_LEVEL"] = "INFO"
                logger.remove()
                logger.add(sys.stderr, level="INFO")
            run()

        return main

    return decorate


def forced_override(argument: str, groups: bool = True) -> str:
    """`a.b=1` and `+a.b=1` as Hydra's `++a.b=1` (set or add); groups, options and deletions stay as they are."""
    return re.sub(rf"^\+{{0,2}}(?=\w+(\.\w+){'+' if groups else '*'}=)", "++", argument)
