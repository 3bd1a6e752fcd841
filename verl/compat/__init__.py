"""Compatibility with verl: serves the import paths that `verl.compat.table` lists.

`install` adds one finder to `sys.meta_path`. An old path of one live module gives that very module, so that a name
that is replaced in it is replaced for the code that uses it. Other paths give a module that is built from names of
several live modules.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from verl.compat import table


def live_name(path: str) -> str | None:
    """The one live module that an old path stands for; None for paths of NAMES and for those that are not old."""
    if path in table.MODULES or path in table.NAMES:
        return table.MODULES.get(path)
    package = path
    while package and package not in table.PACKAGES:  # ends at the longest old package that holds the path
        package = package.rpartition(".")[0]
    return table.PACKAGES[package] + path.removeprefix(package) if package else None


class CompatModule(ModuleType):
    """A module of names that live elsewhere: replacing a callable replaces it in all of our modules that have it."""

    def __setattr__(self, name: str, value: Any) -> None:
        before = vars(self).get(name)
        if callable(before):
            for module in list(sys.modules.values()):  # a copy: reading an attribute may import more
                ours = getattr(module, "__name__", "").startswith(("verl.", "recipe.", "dllm_reasoning."))
                if ours and vars(module).get(name) is before:
                    vars(module)[name] = value
        super().__setattr__(name, value)


def fill_module(module: ModuleType, sources: Sequence[str]) -> None:
    """Set the names of rows of NAMES; those of "module:*" are its __all__, else all without an underscore."""
    for source in sources:
        home, _, names = source.partition(":")
        live = importlib.import_module(home)
        every = getattr(live, "__all__", None) or [name for name in vars(live) if not name.startswith("_")]
        for name in every if names == "*" else names.split(","):
            here, _, there = name.partition("=")
            value = getattr(live, there or here)
            if not isinstance(value, ModuleType):  # a submodule may have a row of its own
                vars(module)[here] = value
    vars(module)["__all__"] = [name for name in vars(module) if not name.startswith("_")]


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for a package of table.LIVE_PACKAGES, whose names are imported on first use."""
    rows = [source.partition(":") for source in table.LIVE_PACKAGES[package]]
    homes = {name: home for home, _, names in rows for name in names.split(",")}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return get, lambda: sorted({*vars(sys.modules[package]), *homes})


class CompatFinder(MetaPathFinder, Loader):
    """Finds and loads the modules of the table, and no others; those of NAMES are packages, with old paths below."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in table.REMOVED:
            raise ModuleNotFoundError(f"{name} of verl is left out here: {table.REMOVED[name]}", name=name)
        live = live_name(name)
        if live is not None and _exists(live):
            return importlib.util.spec_from_loader(name, self, origin=live)
        return importlib.util.spec_from_loader(name, self, is_package=True) if name in table.NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        live = live_name(spec.name)
        if live is None:
            return CompatModule(spec.name)
        module = importlib.import_module(live)
        spec.loader_state = module.__spec__  # importlib replaces it by `spec`; exec_module puts it back
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec.loader_state is not None:  # of a live module, which is complete
            module.__spec__ = spec.loader_state
            if module.__name__.startswith("verl.compat."):  # it has names of other modules, for code to replace
                module.__class__ = CompatModule
            return
        fill_module(module, table.NAMES[spec.name])
        module.__doc__ = f"Compatibility with verl: names of {', '.join(table.NAMES[spec.name]) or 'its modules'}."

    def get_code(self, name: str) -> CodeType:
        """The code of the live module, for `python -m` with an old path."""
        live = importlib.util.find_spec(live_name(name))
        return live.loader.get_code(live.name)


def _exists(live: str) -> bool:
    """Whether the live module is there: an old package may have had others."""
    try:
        return importlib.util.find_spec(live) is not None
    except ModuleNotFoundError:
        return False


def install() -> None:
    """Serve the old paths from now on; a second call changes nothing."""
    if not any(isinstance(finder, CompatFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, CompatFinder())
