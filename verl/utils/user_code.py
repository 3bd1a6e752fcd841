"""Names a user's own code in messages: where a function is defined, and which frame of a traceback belongs to it."""

import functools
import inspect
import re
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from verl.utils.registry import installed_plugins

FRAME = re.compile(r'File "([^"<]+)", line (\d+), in (\S+)')
CHAINED = re.compile(r"\n\s*(?:The above exception was|During handling of the above)")
PROJECT = Path(__file__).resolve().parents[2]
RECIPES = {path.split(".")[0] for kind in ("rollouts", "auxiliary_losses") for path in installed_plugins(kind).values()}
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
NOT_OF_USERS = (*LIBRARIES, *(str(PROJECT / package) for package in ("verl", *RECIPES)))


def defined_at(function: Callable[..., Any]) -> str:
    """`my_loss (my_loss.py:7)`; the name alone where the source is unknown."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name} ({_shown(code.co_filename)}:{code.co_firstlineno})"


def kind(value: Any) -> str:
    """Type of a value in words, with the shapes of tensors: `(a tensor of shape (2, 3), a dict)`."""
    if isinstance(value, tuple):
        return f"({', '.join(map(kind, value))})"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def full_traceback(error: BaseException) -> str:
    """The traceback with those of its causes and of Ray's remote errors, without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", "".join(traceback.format_exception(error)))


def user_frame(text: str) -> str | None:
    """`my_loss.py:7, in my_loss`: the innermost frame outside of Python, packages and this project, or None."""
    for block in CHAINED.split(text):  # the first cause comes first
        frames = [frame for frame in FRAME.findall(block) if not frame[0].startswith(NOT_OF_USERS)]
        if frames:
            file, line, name = frames[-1]
            return f"{_shown(file)}:{line}, in {name}"
    return None


def _shown(file: str) -> str:
    """A path relative to the working directory if it is inside it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
