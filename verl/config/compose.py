"""From composed configs to typed trees, and back; the command line of entries with Hydra."""

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from loguru import logger
from omegaconf import DictConfig, ListConfig, OmegaConf

from verl.config.base import BaseConfig
from verl.config.defaults import resolved
from verl.config.fields import default_of, field_metadata, field_types, known_names, refuse_unknown, section_type
from verl.config.inert import OLD_KEYS
from verl.utils.import_utils import load_class_from_fqn

Settings = TypeVar("Settings", bound=BaseConfig)
MEGATRON_HINT: str = OLD_KEYS["RL"]["critic.megatron"]["otherwise"]
CHOICE = "choice_of_a_group"  # key for the choice of a config group that the trees here do not have


def to_settings(config: Any, config_type: type[Settings], checked: bool = True) -> Settings:
    """The typed tree of a composed config or a dictionary; a typed one is returned as it is.

    Keys that `config` lacks have their defaults. A `_target_` may name a subclass for its section. Keys that the type
    does not have, such as the section of a recipe, become further attributes. Raises ValueError for a wrong value,
    unless `checked` is false: for a part that reads a few values of a section that is checked elsewhere.
    """
    if isinstance(config, BaseConfig):
        return config
    if OmegaConf.is_config(config):
        config = resolved(config)
    return _typed(config or {}, config_type, checked)


def _typed(values: Mapping[str, Any], config_type: type[Settings], checked: bool, strict: bool = False) -> Settings:
    """to_settings of a dictionary; `strict`: it was not composed, so unknown keys are refused and values converted."""
    if isinstance(target := values.get("_target_"), str) and target:
        named = load_class_from_fqn(target, "config dataclass")
        config_type = named if isinstance(named, type) and issubclass(named, config_type) else config_type
    names, known = set(known_names(config_type)), {}
    if strict:
        refuse_unknown(config_type.section, values, sorted(names))
    for name in names & values.keys():
        section = section_type(field_types(config_type).get(name))
        nested = section is not None and isinstance(values[name], dict)
        known[name] = _typed(values[name], section, checked, strict) if nested else values[name]
    if strict:
        known |= _converted(known, config_type)
    if checked:
        settings = config_type(**known)
    else:
        settings = object.__new__(config_type)
        settings.__dict__.update({f.name: default_of(config_type, f.name) for f in fields(config_type)} | known)
    for name in values.keys() - names:
        value = values[name]
        object.__setattr__(settings, name, OmegaConf.create(value) if isinstance(value, dict | list) else value)
    return settings


def _converted(values: Mapping[str, Any], config_type: type[BaseConfig]) -> dict[str, Any]:
    """The values of fields that are no sections, as OmegaConf converts them: "1e-5" to a float, for example.

    Raises omegaconf's MissingMandatoryValue for "???", and its ValidationError for a value of another type.
    """
    own = {f.name for f in fields(config_type)}
    plain = {name: value for name, value in values.items() if name in own and not isinstance(value, BaseConfig)}
    node = OmegaConf.merge(OmegaConf.structured(config_type), plain)
    return {name: to_plain(node[name]) for name in plain}


def to_plain(settings: Any) -> Any:
    """A typed tree as nested dictionaries with the keys of the yaml files, further attributes included."""
    if OmegaConf.is_config(settings):
        return resolved(settings)
    if isinstance(settings, BaseConfig):
        names = {f.name for f in fields(settings)} - {"_target_"}
        internal = {name for name in names if not field_metadata(type(settings), name)["help"]}
        internal |= set() if settings._target_ else {"_target_"}
        return {name: to_plain(value) for name, value in vars(settings).items() if name not in internal}
    if isinstance(settings, Mapping):
        return {name: to_plain(value) for name, value in settings.items()}
    return [to_plain(value) for value in settings] if isinstance(settings, list | tuple) else settings


def to_omegaconf(settings: Mapping[str, Any]) -> DictConfig:
    """A typed tree as the DictConfig that plug-ins written for verl get."""
    return settings if isinstance(settings, DictConfig) else OmegaConf.create(to_plain(settings))


def select(settings: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a dotted path of a typed tree or of nested dictionaries; the default where there is none."""
    node: Any = settings
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every setting that is not a section."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def with_values(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """A copy of a typed tree with other values, by dotted key. Raises ValueError for a wrong one."""
    changes: dict[str, Any] = {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        section = changes.get(name, getattr(settings, name))
        changes[name] = with_values(section, {rest: value}) if rest else value
    changed = replace(settings, **changes)
    for name in vars(settings).keys() - vars(changed).keys():
        object.__setattr__(changed, name, getattr(settings, name))
    return changed


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
            raise AssertionError(f"Config node {list(config)} names no dataclass; add _target_ or pass dataclass_type.")
        return instantiate(config, _convert_="partial")
    node = config if isinstance(config, DictConfig | ListConfig) else OmegaConf.create(config)
    plain = resolved(node)  # interpolations may point above the node
    if issubclass(dataclass_type, BaseConfig):
        return _typed(plain, dataclass_type, checked=True, strict=True)
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
            if re.search(r"--config-name[= ]\S*megatron|@\S*=\S*megatron", " ".join(sys.argv[1:])):
                sys.exit(MEGATRON_HINT)
            sys.argv[1:] = [forced_override(argument, groups) for argument in sys.argv[1:]]
            if "LOGURU_LEVEL" not in os.environ:  # loguru's own default is DEBUG
                os.environ["LOGURU_LEVEL"] = "INFO"
                logger.remove()
                logger.add(sys.stderr, level="INFO")
            run()

        return main

    return decorate


def forced_override(argument: str, groups: bool = True) -> str:
    """`a.b=1` and `+a.b=1` as Hydra's `++a.b=1` (set or add); options, deletions and groups (no dot) stay as they are.

    `engine=fsdp`, the choice of a group that only later versions of verl have, becomes a key of `verl.config.aliases`.
    """
    later_groups = ("model_engine",) if groups else ("engine", "optim", "profiler")
    argument = re.sub(rf"^({'|'.join(later_groups)})=", rf"\1.{CHOICE}=", argument)
    return re.sub(rf"^\+{{0,2}}(?=\w+(\.\w+){'+' if groups else '*'}=)", "++", argument)
