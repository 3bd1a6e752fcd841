"""What safetensors files say of themselves: names and shapes, without reading a weight."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from verl.utils.problems import one_line


class WeightFileError(ValueError):
    """A weight file is missing or torn; the text names it."""


def safetensors_of(folder: str | Path) -> list[Path]:
    """The safetensors files of a model folder: those that its index names, else all that lie there."""
    index = Path(folder) / "model.safetensors.index.json"
    if index.is_file():
        return sorted({index.with_name(name) for name in json.loads(index.read_text())["weight_map"].values()})
    return sorted(Path(folder).glob("*.safetensors"))


def tensor_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in these files; one that is missing, cut or no safetensors is refused."""
    from safetensors import SafetensorError, safe_open

    shapes = {}
    for file in files:
        try:
            with safe_open(file, "np") as opened:
                shapes.update({name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()})
        except (OSError, SafetensorError) as error:
            raise WeightFileError(f"{file} is missing or torn ({one_line(error)}); copy or save it again.") from error
    return shapes
