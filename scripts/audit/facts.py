"""What the audit compares of a release: names with signatures, keys with defaults, metrics; from its files or a list.

The lists of the releases in VERSIONS are stored next to this file, so that a comparison needs no wheel and no network.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from scripts.audit.keys import TREES, metrics_of, upstream_keys
from scripts.audit.names import BY_NAME, BY_POSITION, EXPRESSION, Signature, upstream_names

VERSIONS = ("0.7.0", "0.9.1")
FOLDER = Path(__file__).with_name("releases")


@dataclass
class Facts:
    """Of a release: {file: {name: signature or None}}, {yaml file: {key: default}}, metric names."""

    modules: dict[str, dict[str, Signature | None]]
    keys: dict[str, dict[str, object]]
    metrics: set[str]

    @classmethod
    def of(cls, release: dict[str, str]) -> "Facts":
        """The facts of {path: text}."""
        files = [path for path in release if path.endswith(".py")]
        names = {path: upstream_names(release[path], path.endswith("__init__.py")) for path in sorted(files)}
        keys = {file: upstream_keys(release, file) for file in TREES if file in release}
        return cls(names, keys, metrics_of(release))

    @classmethod
    def load(cls, file: Path) -> "Facts":
        """The facts of a stored list."""
        return cls.parse(file.read_text(encoding="utf-8"))

    @classmethod
    def parse(cls, text: str) -> "Facts":
        """The facts of the text of such a list."""
        stored = json.loads(text)
        modules = stored["names"].items()
        names = {path: {name: _parsed(text) for name, text in entries.items()} for path, entries in modules}
        return cls(names, stored["keys"], set(stored["metrics"]))

    def text(self) -> str:
        """The stored list, one module or tree a line."""
        names = {path: {name: _shown(s) for name, s in names.items()} for path, names in self.modules.items()}
        parts = {"names": names, "keys": self.keys}
        blocks = [f'"{part}": {{\n{_lines(values)}\n}}' for part, values in parts.items()]
        return "{\n" + ",\n".join([*blocks, f'"metrics": {json.dumps(sorted(self.metrics))}']) + "\n}\n"


def stored(version: str) -> Path:
    """The file of a release's list."""
    return FOLDER / f"{version}.json"


def _lines(values: dict[str, object]) -> str:
    lines = (f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in sorted(values.items()))
    return ",\n".join(lines)


def _shown(signature: Signature | None) -> str | None:
    """A signature as the parameters of a function's text."""
    if signature is None:
        return None
    parts: list[str] = []
    positions = [p.passed == BY_POSITION for p in signature.parameters]
    for number, p in enumerate(signature.parameters):
        if p.passed == BY_NAME and "*args" not in parts and "*" not in parts:
            parts.append("*")
        default = "..." if p.default == EXPRESSION else p.default
        parts.append(p.name if default is None else f"{p.name}={default}")
        if positions[number] and not any(positions[number + 1 :]):
            parts.append("/")
    return f"{'async ' * signature.is_async}({', '.join(parts)})"


def _parsed(text: str | None) -> Signature | None:
    if text is None:
        return None
    start, _, parameters = text.partition("(")
    return upstream_names(f"{start}def f({parameters}: ...", False)["f"]
