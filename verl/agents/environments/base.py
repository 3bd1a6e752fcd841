"""The interface of an environment, and how the adapter of a library is found."""

import hashlib
import importlib
import itertools
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.config.compose import to_settings
from verl.config.environment import ADAPTERS, EnvironmentConfig
from verl.utils.import_utils import load_class_from_fqn

Message = dict[str, Any]
#: Asks the model for the next turn of a conversation: (messages so far, schemas of tools or None) -> its message.
Ask = Callable[[list[Message], list[dict[str, Any]] | None], Awaitable[Message]]
SPLITS = ("train", "val")


@dataclass(frozen=True)
class Library:
    """A library: the module that is imported, and the package and version that the tests use."""

    module: str
    package: str
    version: str


class NoMoreTurns(RuntimeError):
    """Raised to an environment that asks for a turn after data.environment.max_turns, or when no token is left."""


class Environment(AbstractAsyncContextManager, ABC):
    """Tasks of a library: rows of the data set, and conversations about them, which it scores.

    `library` is the module of LIBRARY, imported, or None for an adapter without LIBRARY. An instance is used as
    `async with`, in one event loop.
    """

    LIBRARY: Library | None = None

    def __init__(self, settings: EnvironmentConfig, library: ModuleType | None) -> None:
        self.settings, self.library = settings, library

    async def __aexit__(self, *error: Any) -> None:
        """Free what `__aenter__` started."""

    @abstractmethod
    async def rows(self, split: str, files: list[str]) -> list[dict[str, Any]]:
        """The rows of "train" or "val" in the format of data files.

        `extra_info.environment` of a row is the item that `converse` gets, which JSON can hold. `files` are those of
        data.train_files or data.val_files, for a library whose tasks come from files.
        """

    @abstractmethod
    async def converse(self, item: dict[str, Any], ask: Ask) -> dict[str, Any]:
        """Lead one conversation and score it: {"score": a finite number, further numbers by name}.

        `ask` raises NoMoreTurns where the model may not answer again; what it wrote until then is scored.
        """


def adapter_class(name: str) -> type[Environment]:
    """The subclass of Environment for data.environment.name: a key of ADAPTERS, or a class path."""
    adapter = load_class_from_fqn(ADAPTERS.get(name, name), "data.environment.name")
    if not (isinstance(adapter, type) and issubclass(adapter, Environment)):
        raise TypeError(f"data.environment.name={name} is no subclass of verl.agents.environments.base.Environment")
    return adapter


def load_environment(settings: dict[str, Any]) -> Environment:
    """The environment of data.environment. ImportError names the package to install if its library is missing."""
    config = to_settings(settings, EnvironmentConfig)
    adapter = adapter_class(config.name)
    known = adapter.LIBRARY
    if known is None:
        return adapter(config, None)
    try:
        library = importlib.import_module(known.module)
    except ModuleNotFoundError as error:
        if error.name != known.module.partition(".")[0]:
            raise
        raise ImportError(
            f"data.environment.name={config.name}: the package {known.package}=={known.version} is not installed here. "
            "Install it in a virtual environment of its own, since its requirements may contradict those of vLLM: "
            "docs/environments.md."
        ) from error
    return adapter(config, library)


def import_path(path: str | None) -> ModuleType | None:
    """The module of data.environment.path, a Python file or a package's folder, imported under its own name.

    Raises FileNotFoundError for a path that does not exist.
    """
    if path is None:
        return None
    file = Path(path).expanduser().resolve()
    if not file.exists():
        raise FileNotFoundError(f"data.environment.path={path}: there is no such file or folder.")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
        # For the servers that an environment starts with modules of its own.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(file.parent), os.environ.get("PYTHONPATH"))))
    return importlib.import_module(file.stem)


def check_ranges(settings: EnvironmentConfig, **ranges: tuple[int, int]) -> None:
    """Raise ValueError if two ranges of seeds {key: (first, number)} overlap: items of both would be equal."""
    named = sorted(ranges.items(), key=lambda pair: pair[1])
    for (name, (first, number)), (other, (start, _)) in itertools.pairwise(named):
        if first + number > start:
            raise ValueError(
                f"data.environment.{name} with {number} items takes the seeds {first} to {first + number - 1}, and "
                f"data.environment.{other} begins at {start}: both would have the same items. Move one of them."
            )


def digest(messages: list[Message]) -> str:
    """A short hash of messages, to notice that a prompt is not that of the row."""
    plain = [(message["role"], message.get("content") or "") for message in messages]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]


def make_row(
    source: str, messages: list[Message], truth: Any, index: int, item: dict[str, Any], settings: EnvironmentConfig
) -> dict[str, Any]:
    """A row of the data set: `item` is what `converse` gets, with the hash of the prompt added."""
    agent = {"agent_name": "environment_agent"} if settings.max_turns > 1 else {}
    return {
        "data_source": source, "prompt": messages, "reward_model": {"style": "environment", "ground_truth": truth},
        "extra_info": {"index": index, "environment": {**item, "prompt": digest(messages)}}, **agent,
    }  # fmt: skip
