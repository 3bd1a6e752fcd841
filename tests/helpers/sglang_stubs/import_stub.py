"""Packages that can be imported on a machine without a GPU, with every name that is asked for, and do nothing."""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType


class Name:
    """A name of such a package: it has attributes, and raises when it is called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Name":
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self._name} is a stub (tests/helpers/sglang_stubs): it needs a machine with a GPU")


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of a package."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name, path=None, target=None):
        inside = name.startswith(f"{self.package}.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__getattr__ = Name(spec.name).__getattr__
        return module

    def exec_module(self, module):
        pass


def make_stub(package: str):
    """Make all submodules of a package importable; returns the package's own __getattr__."""
    sys.meta_path.append(Submodules(package))
    return Name(package).__getattr__
