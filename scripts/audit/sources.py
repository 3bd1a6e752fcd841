"""Reads the files of an upstream release as text, from its wheel or an unpacked folder; nothing of it is imported."""

import zipfile
from pathlib import Path

from omegaconf import DictConfig, OmegaConf


def read_release(path: Path) -> dict[str, str]:
    """{path inside the release: text} of its Python and yaml files below verl/."""
    wanted = (".py", ".yaml")
    if path.is_file():
        with zipfile.ZipFile(path) as wheel:
            names = [n for n in wheel.namelist() if n.startswith("verl/") and n.endswith(wanted)]
            return {name: wheel.read(name).decode() for name in names}
    root = path if (path / "verl").is_dir() else path.parent
    files = sorted(f for f in (root / "verl").rglob("*") if f.suffix in wanted)
    if not files:
        raise FileNotFoundError(f"{path} is neither a wheel nor a folder that holds verl/")
    return {f.relative_to(root).as_posix(): f.read_text(encoding="utf-8") for f in files}


def flat(tree: object, prefix: str = "") -> dict[str, object]:
    """{dotted key: value} of nested mappings; an empty mapping is a value."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    values: dict[str, object] = {}
    for key, value in tree.items():
        values.update(flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return values


def yaml_of(release: dict[str, str], path: str) -> DictConfig:
    """A yaml file of the release, read as Hydra reads it (1e-5 is a number)."""
    if path not in release:
        raise FileNotFoundError(f"the release has no {path}")
    return OmegaConf.create(release[path])
