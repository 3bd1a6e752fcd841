"""Checks what docs/migrating.md says of this tree: what it names in backticks exists, and each departure is shown."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from scripts.audit import compat
from scripts.audit.keys import FAMILIES
from verl.report.metric_names import unknown_metrics

CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?:[\w\-.]+/)*[\w\-.]+(?:/|\.(?:py|yaml|md|sh|jinja|txt|html))")
KEY = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)+")
METRIC = re.compile(rf"(?:{'|'.join([*FAMILIES, 'spd'])})/[\w/@*]+")
WORD = re.compile(r"-{0,2}[A-Za-z_][\w\-]*")
SOURCES = ("verl", "recipe", "dllm_reasoning", "scripts", "examples")
ADDED, DEPARTURES = "## What this project adds", "## Where it departs"
LEFT_OUT = "## Left out on purpose"
#: headings of the tables of each release in docs/verl_names.md
AUDITS = {version: f"## Audit of verl {version}" for version in ("0.7.0", "0.9.1")}


def named(text: str) -> list[str]:
    """Every piece of code in backticks, braces spelt out: `a.{b,c}` is a.b and a.c."""
    expanded: list[str] = []
    for piece in CODE.findall(text):
        match = re.fullmatch(r"(.*)\{([\w,]+)\}(.*)", piece)
        expanded += [f"{match[1]}{part}{match[3]}" for part in match[2].split(",")] if match else [piece]
    return list(dict.fromkeys(expanded))


def section(text: str, heading: str) -> str:
    """The lines under the first heading that begins like this, up to the next heading; empty without one."""
    return re.split(r"^##", text.partition(heading)[2], maxsplit=1, flags=re.M)[0]


def tables(text: str) -> list[list[list[str]]]:
    """Of each table the cells of each row, without its head."""
    expanded = re.findall(r"(?:^\|.*\n)+", f"{text}\n", re.M)
    return [[[cell.strip() for cell in row.strip("|").split(" | ")] for row in t.splitlines()[2:]] for t in expanded]


class Tree:
    """What a piece of code may name: paths, make targets, configuration keys, and words of the code."""

    def __init__(self, root: Path, known_keys: set[str]) -> None:
        self.root = root
        self.targets = set(re.findall(r"^([a-z0-9\-]+):", (root / "Makefile").read_text(), re.M))
        sources = [*root.glob("*.py"), *(f for folder in SOURCES for f in (root / folder).rglob("*.py"))]
        self.files = {p.name for p in [*sources, *root.glob("*")]}
        self.sections = {key.split(".")[0] for key in known_keys}
        parts = [tuple(key.split(".")) for key in known_keys]
        self.runs = {p[i:j] for p in parts for i in range(len(p)) for j in range(i + 1, len(p) + 1)}
        self.words = {part for key in parts for part in key}
        self.words.update(name for f in sources for name in (f.stem, f.parent.name))
        self.words.update(part for path in compat.rows() for part in path.split("."))
        for file in sources:
            self.words.update(_words(ast.parse(file.read_text(encoding="utf-8"))))

    def lacks(self, piece: str) -> str:
        """What is wrong with a piece of code; empty where it is there."""
        name, _, value = piece.partition("=")
        if piece.startswith("make "):
            return "" if piece.split()[1] in self.targets else "the Makefile does not have this target"
        if piece.startswith("python -m "):
            module = piece.split()[2]
            place = self.root / module.replace(".", "/")
            there = place.is_dir() or place.with_suffix(".py").is_file() or module in compat.rows()
            return "" if there else "the module does not exist"
        if METRIC.fullmatch(metric := piece.replace("...", "*")):
            return "the metric does not exist" if unknown_metrics([metric]) else ""
        if FILE.fullmatch(piece):
            there = (self.root / piece).exists() or piece in self.files | self.words  # a run writes the last kind
            return "" if there else "the file does not exist"
        if KEY.fullmatch(name) and name.split(".")[0] in self.sections and tuple(name.split(".")) not in self.runs:
            return "the key does not exist"
        return self._strange(name, value)

    def _strange(self, name: str, value: str) -> str:
        parts = WORD.findall(f"{name} {value}")
        if not parts:
            return "neither a file, key, metric, command nor a name of the code"
        unknown = [part for part in parts if part not in self.words and not self._is_end(part)]
        return f"the code has no {unknown[0]!r}" if unknown else ""

    def _is_end(self, part: str) -> bool:
        return part.startswith("_") and any(word.endswith(part) for word in self.words)


def _words(tree: ast.AST) -> Iterator[str]:
    """Names of a syntax tree, and texts that are one word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from [node.value] if re.fullmatch(r"[\w\-.]+", node.value) else []
        else:
            names = (getattr(node, field, None) for field in ("id", "attr", "arg", "name"))
            yield from (name for name in names if isinstance(name, str))


def unfounded(page: Path, known_keys: set[str], root: Path) -> list[str]:
    """What the page names and this tree lacks, what it calls left out and exists, additions without a file."""
    text, tree = page.read_text(encoding="utf-8"), Tree(root, known_keys)
    left_out = section(text, LEFT_OUT)
    wrong = [f"`{piece}`: {lack}" for piece in named(text.replace(left_out, "")) if (lack := tree.lacks(piece))]
    wrong += [f"`{piece}` is left out, and the code has it" for piece in named(left_out) if not tree.lacks(piece)]
    for what, *where in (row for rows in tables(section(text, ADDED)) for row in rows):
        if not any(FILE.fullmatch(piece) for piece in named(" ".join(where))):
            wrong.append(f"{what[:60]!r} does not exist: name its file or folder")
    return wrong
