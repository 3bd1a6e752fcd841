"""BaseConfig: what every component's settings have in common."""

import copy
import difflib
from abc import ABCMeta
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Any, ClassVar

from loguru import logger
from omegaconf import MISSING

from verl.config.fields import check_settings
from verl.config.inert import old_keys_of


class AcceptsOldKeys(ABCMeta):
    """Metaclass of settings: their constructors also accept keys of old scripts (`old_keys_of`), which are not fields.

    A value stays readable under the old key, for code written for verl, and is also that of the field `new`, if any.
    """

    def __call__(cls, *args: Any, **given: Any) -> Any:
        made, old = cls.__new__(cls), old_keys_of(cls)
        for name in given.keys() & old.keys():
            made.__dict__[name] = value = given.pop(name)
            new = old[name].get("new")
            if new is not None and value is not None:
                logger.warning("{}.{} is an old name; it sets {}.{}={}", cls.section, name, cls.section, new, value)
                given[new] = value
        made.__init__(*args, **given)
        return made


@dataclass
class BaseConfig(Mapping, metaclass=AcceptsOldKeys):
    """Settings as a dataclass that can also be read as a mapping over its fields; values are checked when it is made.

    A field is written once, by the constructor or by `__post_init__` through `object.__setattr__`; afterwards a change
    raises FrozenInstanceError. `_mutable_fields` of a user's subclass are exempt. The class argument `section` is the
    start of the keys in messages.
    """

    section: ClassVar[str] = "config"
    _mutable_fields: ClassVar[Iterable[str]] = ()
    _target_: str = ""

    def __init_subclass__(cls, section: str | None = None) -> None:
        super().__init_subclass__()
        if section is not None:
            cls.section = section

    def __post_init__(self) -> None:
        check_settings(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ and name not in self._mutable_fields:
            raise FrozenInstanceError(
                f"{type(self).__name__}.{name} is already set to {self.__dict__[name]!r} and cannot become {value!r}; "
                f"build a new config with dataclasses.replace, or list the field in _mutable_fields"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """The default of an old key that the constructor was not given; AttributeError for one that must be given."""
        value = old_keys_of(type(self)).get(name, {"default": MISSING})["default"]
        if value == MISSING:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return copy.deepcopy(value)

    def __getitem__(self, key: str) -> Any:
        """Any attribute that was set; AttributeError for an unknown name, TypeError for a key that is not a string."""
        if not isinstance(key, str):
            raise TypeError(f"{type(self).__name__} is indexed by names, not by {key!r}")
        if not hasattr(self, key):
            close = difflib.get_close_matches(key, self._names(), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise AttributeError(f"{type(self).__name__} has no field {key!r}{hint}")
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and hasattr(self, key)

    def get(self, key: str, default: Any = None) -> Any:
        """Value of attribute `key`, or `default` if there is none."""
        return self[key] if key in self else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    @classmethod
    def _names(cls) -> list[str]:
        return [f.name for f in fields(cls)]
