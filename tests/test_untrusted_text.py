"""No code path of the product runs text or unpickles bytes: the syntax trees are searched.

Names are followed through imports, plain assignments and getattr with a fixed name, whatever they are called in a file.
Not seen: a name that is made while the program runs, and sympy functions that read their arguments as `sympify` does.
"""

import ast
import builtins
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("verl", "recipe", "dllm_reasoning", "scripts", "examples")
PRODUCT = sorted([*ROOT.glob("*.py"), *(f for d in FOLDERS for f in (ROOT / d).rglob("*.py"))])
PICKLES = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "joblib", "jsonpickle")
#: full names that may not occur, called or not
FORBIDDEN = (
    "builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__", "pandas.eval", "*.read_pickle",
    "sympy.*parse_expr", "sympy.*sympify", "math_verify.*ExprExtractionConfig",  # its grammar calls parse_expr
    "shelve.open", "torch.jit.load", "torch.hub.load", "yaml.load", "yaml.full_load*", "yaml.unsafe_load*",
    *(f"{module}.{name}" for module in PICKLES for name in ("load", "loads", "decode", "*Unpickler", "[*]")),
)  # fmt: skip
TORCH_LOAD, NUMPY_LOAD = {"torch.load", "torch.serialization.load"}, {"numpy.load", "np.load"}
MATH_PARSE = {"math_verify.parse", "math_verify.parser.parse"}


class Names:
    """What each name of a file stands for, in full: a set, since two functions may import alike."""

    def __init__(self, tree):
        self.known = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    short, first = alias.asname, alias.name.partition(".")[0]
                    self.known.setdefault(short or first, set()).add(alias.name if short else first)
            elif isinstance(node, ast.ImportFrom):
                for alias, full in zip(node.names, imported(node), strict=True):
                    self.known.setdefault(alias.asname or alias.name, set()).add(full)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.known.setdefault(target.id, {target.id}).update(self.full(node.value))

    def full(self, node):
        """Every dotted name that an expression may be."""
        if isinstance(node, ast.Name):
            own = f"builtins.{node.id}" if hasattr(builtins, node.id) else node.id.strip("_")
            return self.known.get(node.id, {own})
        if isinstance(node, ast.Attribute):
            return {f"{owner}.{node.attr}" for owner in self.full(node.value)}
        if isinstance(node, ast.Call) and node.args and isinstance(text := node.args[-1], ast.Constant):
            function = self.full(node.func)
            if "builtins.getattr" in function and len(node.args) == 2:
                return {f"{owner}.{text.value}" for owner in self.full(node.args[0])}
            if "importlib.import_module" in function:
                return {str(text.value)}
        return {"?"}


def imported(node):
    """Full names of what `from x import a` takes."""
    return [f"{node.module}.{alias.name}" if not node.level else f".{alias.name}" for alias in node.names]


def is_given(call, keyword, value):
    given = {k.arg: k.value for k in call.keywords}.get(keyword)
    return isinstance(given, ast.Constant) and given.value is value


def careless(call, function):
    """What the arguments of a call make dangerous."""
    keywords = {k.arg for k in call.keywords}
    pickles = "allow_pickle" in keywords and not is_given(call, "allow_pickle", False)
    if pickles or (function & NUMPY_LOAD and len(call.args) > 2):
        yield "allow_pickle"
    if function & MATH_PARSE and len(call.args) < 2 and "extraction_config" not in keywords:
        yield "math_verify.parse with ExprExtractionConfig, its default"


def guarded(node, names):
    """Parts of a node that it makes safe: torch.load with weights_only, an Unpickler with an allow-list."""
    if isinstance(node, ast.Call) and names.full(node.func) & TORCH_LOAD and is_given(node, "weights_only", True):
        return [node.func]
    if isinstance(node, ast.ClassDef) and "find_class" in {getattr(part, "name", "") for part in node.body}:
        return node.bases
    return []


def problems_of(source):
    """Names of what the source does that it must not."""
    tree = ast.parse(source)
    names = Names(tree)
    safe = {part for node in ast.walk(tree) for part in guarded(node, names)}
    problems = []
    for node in (node for node in ast.walk(tree) if node not in safe):
        taken = isinstance(node, ast.ImportFrom)
        full_names = imported(node) if taken else names.full(node)
        forbidden = FORBIDDEN if taken else (*FORBIDDEN, *TORCH_LOAD)
        problems += [name for name in full_names if any(fnmatchcase(name, pattern) for pattern in forbidden)]
        problems += careless(node, names.full(node.func)) if isinstance(node, ast.Call) else []
    return problems


@pytest.mark.parametrize("path", [f.relative_to(ROOT).as_posix() for f in PRODUCT])
def test_no_text_is_run_and_no_pickle_is_loaded(path):
    assert problems_of((ROOT / path).read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "eval(x)", "builtins.exec(x)", "__builtins__.eval(x)", "e = eval\ne(x)", "map(eval, x)",
        "compile(x, '', 'exec')",
        "import builtins as b\nb.eval(x)", "from builtins import eval as e\ne(x)", "getattr(builtins, 'exec')(x)",
        "__import__('pickle').loads(x)", "import importlib\nimportlib.import_module('pickle').loads(x)",
        "import sympy\nsympy.parse_expr(x)", "from sympy.parsing.sympy_parser import parse_expr",
        "from sympy.parsing import sympy_parser\nsympy_parser.parse_expr(x)",
        "import sympy\nsympy.parsing.sympy_parser.parse_expr(x)", "import sympy as sp\nsp.sympify(x)",
        "def f():\n    from sympy import sympify as s\n    return s(x)",
        "from math_verify import ExprExtractionConfig", "import math_verify as m\nm.ExprExtractionConfig()",
        "from math_verify.parser import ExprExtractionConfig as E\nE()", "from math_verify import parse as p\np(x)",
        "pickle.loads(x)", "from pickle import load", "import pickle as p\np.loads(x)",
        "import pickle\np = pickle\np.load(f)",
        "from pickle import *\nloads(x)", "import pickle\nfunctools.partial(pickle.loads)(x)",
        "import cloudpickle as c\nc.load(f)", "import joblib\njoblib.load(f)", "import shelve as s\ns.open(f)",
        "import torch\ntorch.load(f)", "import torch as t\nt.load(f)",
        "import torch\ntorch.load(f, weights_only=False)", "import torch\ntorch.load(f, **options)",
        "import torch\ntorch.load(f, weights_only=flag)",
        "from torch import load\nload(f)", "from torch import load as read\nread(f)", "import torch\nread = torch.load",
        "from torch.serialization import load\nload(f)", "import torch\ntorch.jit.load(f)",
        "np.load(f, allow_pickle=True)", "import numpy\nnumpy.load(f, None, True)",
        "from numpy import load as l\nl(f, None, True)",
        "pd.read_pickle(f)", "from pandas import read_pickle as r\nr(f)", "frame().read_pickle(f)",
        "import yaml\nyaml.load(f, yaml.Loader)", "from yaml import unsafe_load",
        "class U(pickle.Unpickler):\n    pass", "import pickle as p\nclass U(p.Unpickler):\n    pass",
        "import pickle\npickle.Unpickler(f)",
    ],
)  # fmt: skip
def test_the_search_finds_each_of_them(source):
    assert problems_of(source) != []


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()", "import re\nre.compile(x)", "import torch\ntorch.compile(x)", "import json\njson.loads(x)",
        "import torch\ntorch.load(f, weights_only=True)", "from torch import load as l\nl(f, weights_only=True)",
        "from safetensors.torch import load\nload(x)", "np.load(f, allow_pickle=False)",
        "import pickle\npickle.dumps(x)",
        "import pickle\nclass U(pickle.Unpickler):\n    def find_class(self, module, name): ...",
        "from math_verify import LatexExtractionConfig as L, parse\nparse(x, extraction_config=[L()])",
        "from math_verify import LatexExtractionConfig as L, parse\nparse(x, [L()])",
        "import yaml\nyaml.safe_load(x)",
        "self.load(f)", "from . import load\nload(f)", "getattr(model, 'eval')()",
    ],
)  # fmt: skip
def test_the_search_leaves_the_harmless_alone(source):
    assert problems_of(source) == []


def test_the_search_covers_the_full_product():
    assert len(PRODUCT) > 200
