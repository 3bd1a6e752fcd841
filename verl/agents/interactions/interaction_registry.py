"""Creates the interactions that a yaml file lists."""

from typing import Any

from verl.agents.entries_file import each_entry
from verl.agents.interactions.base import BaseInteraction
from verl.utils.import_utils import load_class_from_fqn


def get_interaction_class(cls_name: str) -> type:
    """The class for a dotted name such as `package.module.Class`."""
    return load_class_from_fqn(cls_name, "interaction class")


def initialize_interactions_from_config(interaction_config_file: str) -> dict[str, BaseInteraction]:
    """The interactions of a yaml file with the list `interaction`, by name.

    An entry without a name gets that of its class, lower-cased, without the suffix "Interaction". FileNotFoundError, or
    a ValueError that names file and entry; two entries of one name are a ValueError.
    """
    interactions: dict[str, BaseInteraction] = {}

    def create(entry: dict[str, Any]) -> None:
        cls = get_interaction_class(entry["class_name"])
        if not (isinstance(cls, type) and issubclass(cls, BaseInteraction)):
            raise TypeError("the class is no subclass of verl.agents.interactions.base.BaseInteraction")
        name = entry.get("name") or cls.__name__.removesuffix("Interaction").lower()
        if name in interactions:
            raise ValueError(f"the name {name!r} is taken by an earlier entry; set another name")
        interactions[name] = cls({**(entry.get("config") or {}), "name": name})

    each_entry(interaction_config_file, "interaction", create)
    return interactions
