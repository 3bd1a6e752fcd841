"""Compares public names and signatures: upstream's by syntax tree, ours by looking at the imported module."""

import ast
import functools
import importlib
import importlib.util
import inspect
import textwrap
from dataclasses import dataclass, is_dataclass
from typing import Any, NoReturn

from verl.config.inert import old_keys_of

OPERATORS = ("__init__", "__call__", "__getitem__", "__len__", "__iter__")
EXPRESSION = "<expression>"
EITHER, BY_POSITION, BY_NAME = "by position or name", "by position only", "by name only"
PASSED = {
    inspect.Parameter.POSITIONAL_ONLY: BY_POSITION, inspect.Parameter.POSITIONAL_OR_KEYWORD: EITHER,
    inspect.Parameter.KEYWORD_ONLY: BY_NAME,
}  # fmt: skip
REST = {inspect.Parameter.VAR_POSITIONAL: "*args", inspect.Parameter.VAR_KEYWORD: "**kwargs"}
_ABSENT = object()


@dataclass(frozen=True)
class Parameter:
    """A parameter of a signature: how it is passed, and its default (None without one, else its text or EXPRESSION)."""

    name: str
    default: str | None
    passed: str = EITHER


@dataclass(frozen=True)
class Signature:
    """What a call may pass, and whether its result is awaited (or iterated with `async for`)."""

    parameters: tuple[Parameter, ...]
    is_async: bool = False


@dataclass(frozen=True)
class Finding:
    """`name` in `module`: same, differs (how is in `detail`), missing, or ours alone."""

    module: str
    name: str
    status: str
    detail: str = ""


def module_of(path: str) -> str:
    """verl/a/b.py -> verl.a.b; a package's __init__ is the package."""
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def upstream_names(text: str, is_package: bool) -> dict[str, Signature | None]:
    """Public functions, classes with their public methods and fields, and constants of a module; None: no function."""
    entries: dict[str, Signature | None] = {}
    for node in _statements(ast.parse(text).body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _public(node.name):
            entries[node.name] = _signature(node, bound=False)
        elif isinstance(node, ast.ClassDef) and _public(node.name):
            entries.update(_class_names(node))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = [target.id for target in targets if isinstance(target, ast.Name)]
            entries.update({name: None for name in named if _public(name) and name.isupper()})
        elif is_package and isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("verl")):
            exported = (a.asname or a.name for a in node.names)
            entries.update({name: None for name in exported if _public(name) and name != "*"})
    return entries


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Top-level statements, those below an `if` or `try` included."""
    entries = []
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            entries += _statements(node.body) + _statements(node.orelse)
        else:
            entries.append(node)
    return entries


def _class_names(node: ast.ClassDef) -> dict[str, Signature | None]:
    entries: dict[str, Signature | None] = {node.name: None}
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and (_public(item.name) or item.name in OPERATORS):
            decorators = {d.id for d in item.decorator_list if isinstance(d, ast.Name)}
            accessor = any(isinstance(d, ast.Attribute) for d in item.decorator_list) and len(item.args.args) < 3
            plain = None if "property" in decorators or (accessor and f"{node.name}.{item.name}" in entries) else (
                _signature(item, bound="staticmethod" not in decorators)
            )  # fmt: skip
            entries.setdefault(f"{node.name}.{item.name}", plain)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and _public(item.target.id):
            entries[f"{node.name}.{item.target.id}"] = None
    return entries


def _public(name: str) -> bool:
    return not name.startswith("_")


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool) -> Signature:
    args = node.args
    positional = args.posonlyargs + args.args
    passed = [BY_POSITION] * len(args.posonlyargs) + [EITHER] * len(args.args)
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    entries = [Parameter(a.arg, _default(d), p) for a, d, p in zip(positional, defaults, passed, strict=True)]
    entries = entries[1:] if bound else entries
    entries += [Parameter("*args", None)] if args.vararg else []
    entries += [Parameter(a.arg, _default(d), BY_NAME) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    entries += [Parameter("**kwargs", None)] if args.kwarg else []
    return Signature(tuple(entries), isinstance(node, ast.AsyncFunctionDef))


def _default(node: ast.expr | None) -> str | None:
    if node is None:
        return None
    if isinstance(node, ast.Constant) and node.value is ...:  # of a stored list
        return EXPRESSION
    try:
        return repr(ast.literal_eval(node))
    except ValueError:
        return EXPRESSION


def our_names(module: str, wanted: set[str]) -> dict[str, Signature | None] | None:
    """The same of a module of ours, names that it makes when asked included; None if the module does not exist."""
    try:
        entries = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            return None
        raise
    names: dict[str, Signature | None] = {}
    for name in {*filter(_public, dir(entries)), *wanted}:
        value = getattr(entries, name, _ABSENT)
        if value is _ABSENT and hasattr(entries, "__path__") and importlib.util.find_spec(f"{module}.{name}"):
            value = importlib.import_module(f"{module}.{name}")  # an attribute of the package once it is imported
        if value is _ABSENT or _only_raises(value):
            continue
        names[name] = None if isinstance(value, type) else _inspected(value, bound=False)
        if isinstance(value, type) and name in wanted:
            names.update(_inspected_class(name, value))
    return names


def _only_raises(value: Any) -> bool:
    """Whether a function never returns: its name can be imported, and calling it says what works in its place."""
    return inspect.isfunction(value) and value.__annotations__.get("return") in (NoReturn, "NoReturn")


def _inspected_class(name: str, value: type) -> dict[str, Signature | None]:
    entries: dict[str, Signature | None] = {}
    items = {*dir(value), *_annotations(value), *_of_instances(value)}
    items |= {*old_keys_of(value)} if is_dataclass(value) else set()  # accepted as arguments, read as their defaults
    items |= {item for base in value.__mro__ for item in vars(base)}  # an enumeration's dir() leaves its methods out
    for item in items:
        if not _public(item) and item not in OPERATORS:
            continue
        raw = inspect.getattr_static(value, item, None)
        static = isinstance(raw, staticmethod)
        raw = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
        entries[f"{name}.{item}"] = _inspected(raw, bound=not static)
    return entries


def _annotations(value: type) -> set[str]:
    return {name for base in value.__mro__ if base is not object for name in inspect.get_annotations(base)}


def _of_instances(value: type) -> set[str]:
    """Attributes that a method of a class of ours sets on self."""
    own = [base for base in value.__mro__ if base.__module__.startswith("verl")]
    trees = [ast.parse(textwrap.dedent(inspect.getsource(base))) for base in own]
    targets = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {t.attr for t in targets if isinstance(t.ctx, ast.Store) and isinstance(t.value, ast.Name)}


ADDED_BY_RAY = "_ray_trace_ctx"  # to the methods of a class that this process made remote


def _inspected(value: Any, bound: bool) -> Signature | None:
    value = getattr(value, "_function", value)  # of a Ray task
    if not (inspect.isroutine(value) or isinstance(value, functools.partial) or hasattr(value, "__wrapped__")):
        return None
    try:
        parameters = list(inspect.signature(value).parameters.values())[1 if bound else 0 :]
    except (ValueError, TypeError):
        return None
    plain = inspect.unwrap(value)
    is_async = inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain)
    return Signature(tuple(_parameter(p) for p in parameters if p.name != ADDED_BY_RAY), is_async)


def _parameter(p: inspect.Parameter) -> Parameter:
    if p.kind in REST:
        return Parameter(REST[p.kind], None)
    if p.default is p.empty:
        return Parameter(p.name, None, PASSED[p.kind])
    plain = isinstance(p.default, bool | int | float | str | type(None) | tuple | list | dict | set)
    default = repr(p.default) if plain and type(p.default).__module__ == "builtins" else EXPRESSION
    return Parameter(p.name, default, PASSED[p.kind])


def compare_names(path: str, theirs: dict[str, Signature | None]) -> list[Finding]:
    """Every public name of an upstream module against ours of the same name; names of ours alone last."""
    module = module_of(path)
    ours = our_names(module, {name.partition(".")[0] for name in theirs})
    if ours is None:
        return [Finding(module, name, "missing", "no module") for name in theirs]
    entries = []
    for name, signature in theirs.items():
        if name not in ours:
            entries.append(Finding(module, name, "missing"))
            continue
        detail = difference(signature, ours[name]) if signature else ""
        entries.append(Finding(module, name, "differs" if detail else "same", detail))
    own = sorted(n for n in ours if "." not in n and n not in theirs and _defined_here(module, n))
    return entries + [Finding(module, name, "ours alone") for name in own]


def _defined_here(module: str, name: str) -> bool:
    entries = importlib.import_module(module)  # of a path that verl.compat serves, the live module
    value = getattr(entries, name)
    return (inspect.isroutine(value) or isinstance(value, type)) and value.__module__ == entries.__name__


def difference(theirs: Signature, ours: Signature | None) -> str:
    """In words how our signature differs from theirs; empty where it does not."""
    if ours is None:
        return "a function, ours is none"
    here, there = {p.name: p for p in ours.parameters}, {p.name: p for p in theirs.parameters}
    differences = [f"lacks {n}" for n in there if n not in here] + [f"adds {n}" for n in here if n not in there]
    shared = [(p, here[name]) for name, p in there.items() if name in here]
    for p, own in shared:
        if p.passed != own.passed:
            differences.append(f"{p.name} is passed {p.passed}, ours {own.passed}")
        if _other_default(p.default, own.default):
            differences.append(f"default of {p.name}: {p.default or 'none'}, ours {own.default or 'none'}")
    by_place = [p.name for p, own in shared if BY_NAME not in (p.passed, own.passed)]
    if by_place != [n for n in here if n in by_place]:
        differences.append("another order")
    if theirs.is_async != ours.is_async:
        differences.append("is awaited, ours not" if theirs.is_async else "is not awaited, ours is")
    return "; ".join(differences)


def _other_default(theirs: str | None, ours: str | None) -> bool:
    """Whether defaults differ; of an expression no more is known than that it is one."""
    if EXPRESSION in (theirs, ours):
        return None in (theirs, ours)
    return theirs != ours
