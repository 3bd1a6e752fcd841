"""Lists the import paths of verl that work here: each module with its public names and what they are.

    python scripts/audit/import_paths.py --json FILE
"""

import argparse
import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.audit import compat, facts  # noqa: E402
from verl.utils.fs import output_file  # noqa: E402


def paths() -> list[str]:
    """Every module of verl 0.7.0, its packages included, and every other path that `verl.compat` serves."""
    files = facts.Facts.load(facts.stored("0.7.0")).modules
    modules = {f.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for f in files} | {*compat.rows()}
    for module in list(modules):
        while module := module.rpartition(".")[0]:
            modules.add(module)
    return sorted(modules)


def public_names(module: ModuleType) -> dict[str, str]:
    """{name: what it is} of a module, without imported modules; classes and functions with the module they are from."""
    names = {}
    for name in sorted(n for n in dir(module) if not n.startswith("_")):
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            continue
        kind = "class" if inspect.isclass(value) else "function" if callable(value) else "value"
        home = getattr(value, "__module__", None) if kind != "value" else None
        names[name] = kind if home is None else f"{kind} {home}.{getattr(value, '__qualname__', name)}"
    return names


def import_paths() -> dict[str, dict[str, str]]:
    """{module: its public names} of the paths that can be imported."""
    found = {}
    for path in paths():
        try:
            found[path] = public_names(importlib.import_module(path))
        except ImportError:
            continue
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=output_file, help="write every module with its names and what they are")
    args = parser.parse_args(argv)
    found = import_paths()
    if args.json:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"{len(found)} modules, {sum(map(len, found.values()))} names")
    return 0


if __name__ == "__main__":
    sys.exit(main())
