"""No code path of the product runs text or unpickles bytes: the syntax trees are searched."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("verl", "recipe", "dllm_reasoning", "scripts")
PRODUCT = sorted([*ROOT.glob("*.py"), *(f for d in FOLDERS for f in (ROOT / d).rglob("*.py"))])
RUNNERS = {"eval", "exec", "compile", "parse_expr", "sympify"}
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}


def findings(source):
    """Names of what the source does that it must not."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function, keywords = node.func, {k.arg: k.value for k in node.keywords}
            name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
            owner = function.value if isinstance(function, ast.Attribute) else None
            owner_name = owner.id if isinstance(owner, ast.Name) else ""
            if name in RUNNERS and (owner is None or owner_name in ("builtins", "__builtins__", "sympy")):
                found.append(name)
            if name in ("load", "loads", "Unpickler") and owner_name in PICKLES:
                found.append(f"{owner_name}.{name}")
            if name == "load" and owner_name == "torch":
                safe = keywords.get("weights_only")
                if not (isinstance(safe, ast.Constant) and safe.value is True):
                    found.append("torch.load")
            allowed = keywords.get("allow_pickle")
            if allowed is not None and not (isinstance(allowed, ast.Constant) and allowed.value is False):
                found.append("allow_pickle")
            if name == "read_pickle":
                found.append(name)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(b).endswith("Unpickler") for b in node.bases):
            if not any(isinstance(part, ast.FunctionDef) and part.name == "find_class" for part in node.body):
                found.append("an Unpickler without an allow-list")
        if isinstance(node, ast.ImportFrom) and node.module in PICKLES:
            found += [f"{node.module}.{a.name}" for a in node.names if a.name in ("load", "loads", "Unpickler")]
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sympy"):
            found += [a.name for a in node.names if a.name in RUNNERS]
    return found


@pytest.mark.parametrize("path", [f.relative_to(ROOT).as_posix() for f in PRODUCT])
def test_no_text_is_run_and_no_pickle_is_loaded(path):
    assert findings((ROOT / path).read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "eval(x)", "builtins.exec(x)", "sympy.parse_expr(x)", "from sympy.parsing.sympy_parser import parse_expr",
        "pickle.loads(x)", "from pickle import load", "torch.load(f)", "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)", "pd.read_pickle(f)", "class U(pickle.Unpickler):\n    pass",
    ],
)  # fmt: skip
def test_the_search_finds_each_of_them(source):
    assert findings(source) != []


def test_the_search_leaves_the_harmless_alone():
    assert findings("model.eval(); re.compile(x); torch.load(f, weights_only=True); json.loads(x)") == []
    assert len(PRODUCT) > 100
