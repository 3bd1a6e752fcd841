"""Safetensors files, never more than one tensor of them in memory."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loguru import logger

from verl.utils.problems import one_line

if TYPE_CHECKING:
    import torch

#: the format's names of dtypes -> torch's
FILE_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip

# Ends of the names of output matrix and embedding.
HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
ROWS_COMPARED = 4096  # at a time


class WeightFileError(ValueError):
    """A weight file is missing or incomplete; the text names it."""


def safetensors_of(folder: str | Path) -> list[Path]:
    """The safetensors files of a model folder: those that its index names, else all in the folder.

    WeightFileError for an index that is not one.
    """
    index = Path(folder) / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return sorted({index.with_name(name) for name in names})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightFileError(f"{index} is no index of weights ({one_line(error)}); copy it again.") from error
    return sorted(Path(folder).glob("*.safetensors"))


class StoredTensor(NamedTuple):
    """A tensor in a file, with the format's name of its dtype."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Every tensor in these files by name; a file that is missing, cut or no safetensors is refused."""
    from safetensors import SafetensorError, safe_open

    tensors = {}
    for file in files:
        try:
            with safe_open(file, "np") as opened:
                parts = {name: opened.get_slice(name) for name in opened.keys()}
                tensors |= {n: StoredTensor(file, n, p.get_dtype(), tuple(p.get_shape())) for n, p in parts.items()}
        except (OSError, SafetensorError) as error:
            raise WeightFileError(f"{file} is missing or incomplete ({one_line(error)}); copy it again.") from error
    return tensors


def tensor_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in these files; raises as `stored_tensors`."""
    return {name: tensor.shape for name, tensor in stored_tensors(files).items()}


def untie_by_weights(config: Any, folder: str | Path) -> bool:
    """Set the config's tie_word_embeddings to false, with a warning, if the folder has an output matrix of its own.

    That is one that differs from the embedding: transformers uses it whatever the flag says, engines and exports go
    by the flag. Returns whether it was set.
    """
    if not _flagged(config) or not _has_own_head(str(Path(folder).expanduser())):
        return False
    untie(config, folder)
    return True


def untie(config: Any, place: str | Path) -> None:
    """Set the config's tie_word_embeddings to false, with a warning that names `place`, where the weights are."""
    logger.warning("{}: tie_word_embeddings is set to false: the output matrix is not the embedding", place)
    for part in _flagged(config):
        part.tie_word_embeddings = False


def _flagged(config: Any) -> list[Any]:
    return [part for part in (config, config.get_text_config()) if getattr(part, "tie_word_embeddings", False)]


@functools.lru_cache(maxsize=16)
def _has_own_head(folder: str) -> bool:
    from safetensors import safe_open

    stored = stored_tensors(safetensors_of(folder))
    head, embedding = (next((t for n, t in stored.items() if n.endswith(ends)), None) for ends in (HEADS, EMBEDDINGS))
    if head is None or embedding is None:
        return False
    if head.shape != embedding.shape:
        return True
    with safe_open(head.file, "pt") as first, safe_open(embedding.file, "pt") as second:
        parts = [opened.get_slice(each.name) for opened, each in ((first, head), (second, embedding))]
        starts = range(0, head.shape[0], ROWS_COMPARED)
        return any(not parts[0][i : i + ROWS_COMPARED].equal(parts[1][i : i + ROWS_COMPARED]) for i in starts)


def write_safetensors(file: Path, described: dict[str, torch.Tensor], read: Callable[[str], torch.Tensor]) -> None:
    """Writes what `read(name)` gives, one tensor at a time, where safetensors' own save_file wants all of them.

    `described`: name -> a tensor (of the meta device) with the shape and dtype that `read` will give. The format: the
    header's length (8 bytes, little endian), a JSON header, the tensors' bytes (https://github.com/huggingface/safetensors).
    """
    import torch

    codes = {vars(torch)[name]: code for code, name in FILE_DTYPES.items()}
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, like in described.items():
        start, end = end, end + like.numel() * like.element_size()
        header[name] = {"dtype": codes[like.dtype], "shape": list(like.shape), "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(file, "wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for name, like in described.items():
            tensor = read(name)
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                actual, wanted = (f"{t.dtype} {tuple(t.shape)}" for t in (tensor, like))
                raise WeightFileError(f"{file}: {name} is {actual}, not {wanted} as described.")
            out.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one is read
