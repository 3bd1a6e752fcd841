"""Checks what CHANGES.md says of this tree: files, keys, metrics and make targets that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

from verl.utils.metric.names import unknown_metrics

CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?:[\w\-.]+/)*[\w\-.]+(?:/|\.(?:py|yaml|md|sh|jinja|txt))")
KEY = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)+(?:=\S+)?")
METRIC = re.compile(r"(?:actor|critic|training|spd|perf|val-core|val-aux|rollout_corr)/[\w/@*]+")


def named(text: str) -> list[str]:
    """Every piece of code in backticks, braces spelt out: `a.{b,c}` is a.b and a.c."""
    found: list[str] = []
    for piece in CODE.findall(text):
        match = re.fullmatch(r"(.*)\{([\w,]+)\}(.*)", piece)
        found += [f"{match[1]}{part}{match[3]}" for part in match[2].split(",")] if match else [piece]
    return list(dict.fromkeys(found))


def unfounded(changes: Path, known_keys: set[str]) -> list[str]:
    """What CHANGES.md names and this tree has not: paths, make targets, configuration keys of known sections."""
    root, wrong = changes.parent, []
    targets = set(re.findall(r"^([a-z\-]+):", (root / "Makefile").read_text(), re.M))
    sections = {key.split(".")[0] for key in known_keys}
    files = {p.name for p in root.rglob("*.py") if ".venv" not in p.parts} | {p.name for p in root.glob("*")}
    tails = {tuple(key.split(".")[i:]) for key in known_keys for i in range(key.count(".") + 1)}
    for piece in named(changes.read_text(encoding="utf-8")):
        if piece.startswith("make "):
            wrong += [] if piece.split()[1] in targets else [f"`{piece}`: the Makefile has no such target"]
        elif METRIC.fullmatch(piece):
            wrong += [f"`{piece}`: no such metric" for _ in unknown_metrics([piece])]
        elif FILE.fullmatch(piece):
            alone = "/" not in piece and (piece in files or piece.endswith((".html", ".txt")))  # written by a run
            there = (root / piece).exists() or alone
            wrong += [] if there else [f"`{piece}`: no such file"]
        elif KEY.fullmatch(piece) and piece.split(".")[0] in sections:
            key = tuple(piece.split("=")[0].split("."))
            wrong += [] if key in tails or any(t[: len(key)] == key for t in tails) else [f"`{piece}`: no such key"]
    return wrong
