"""Reads the tensors of a checkpoint one at a time, in torch's distributed format or as one file per rank."""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor, Partial, Shard

from verl.training.checkpoint.dcp_storage import METADATA_FILE, UntrustedMetadataError, load_tensors, read_metadata
from verl.training.checkpoint.publish import MANIFEST, CheckpointCorruptError, verify_manifest
from verl.utils.problems import one_line
from verl.utils.weight_files import FILE_DTYPES, WeightFileError, safetensors_of, stored_tensors

Described = dict[str, torch.Tensor]  # name -> a tensor on the meta device, of the stored shape and dtype


class MergeError(ValueError):
    """A folder cannot be merged; the message names the file and the fix."""


class TensorSource(ABC):
    """`described` says which tensors there are, `read` gets one of them in full, on the CPU."""

    described: Described

    @abstractmethod
    def read(self, name: str) -> torch.Tensor: ...


class FSDPCheckpoint(TensorSource):
    """`model/` of a checkpoint of this package: what was trained, by the trained module's names."""

    def __init__(self, local_dir: Path) -> None:
        _check_manifest(local_dir)
        self.folder = local_dir / "model"
        content = read_metadata(self.folder).state_dict_metadata
        self.described = {n: torch.empty(m.size, dtype=m.properties.dtype, device="meta") for n, m in content.items()}

    def read(self, name: str) -> torch.Tensor:
        tensor = torch.empty_like(self.described[name], device="cpu")
        with _named_in_errors(self.folder):
            load_tensors({name: tensor}, self.folder)
        return tensor


class RankFiles(TensorSource):
    """`model_world_size_<W>_rank_<r>.pt` of verl 0.7: mapped into memory, put together tensor by tensor."""

    def __init__(self, local_dir: Path, first: Path) -> None:
        ranks = int(first.name.split("_")[3])
        files = [local_dir / f"model_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
        if absent := [file for file in files if not file.is_file()]:
            raise MergeError(f"{absent[0]} is missing: the checkpoint was written by {ranks} ranks; copy all files.")
        self.parts = [_rank_file(file) for file in files]
        self.folder = local_dir
        self.described = {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in self.parts[0].items()
        }

    def read(self, name: str) -> torch.Tensor:
        values = [part[name] for part in self.parts]
        if not isinstance(values[0], DTensor):
            return values[0]
        mesh, placements = values[0].device_mesh, values[0].placements
        if any(isinstance(p, Partial) for p in placements):
            raise MergeError(f"{self.folder}: {name} is stored as a sum over ranks; save it sharded or in full.")
        # Ranks are in the mesh's order; of a dimension that holds copies the first is taken. [mesh shape]
        grid: Any = [v.to_local() for v in values]
        for size, placement in reversed(list(zip(mesh.shape, placements, strict=True))):
            rows = [grid[i : i + size] for i in range(0, len(grid), size)]
            grid = [torch.cat(r, placement.dim) if isinstance(placement, Shard) else r[0] for r in rows]
        if grid[0].shape != values[0].shape:
            raise MergeError(f"{self.folder}: the parts of {name} make {tuple(grid[0].shape)}, not "
                             f"{tuple(values[0].shape)}; a rank's file is of another checkpoint.")  # fmt: skip
        return grid[0]


class HuggingFaceFolder(TensorSource):
    """The safetensors of a model folder."""

    def __init__(self, folder: Path) -> None:
        self.stored = stored_tensors(safetensors_of(folder))
        if not self.stored:
            raise MergeError(f"{folder} holds no *.safetensors; name a Hugging Face model folder.")
        with _named_in_errors(folder):
            dtypes = {name: vars(torch)[FILE_DTYPES[tensor.dtype]] for name, tensor in self.stored.items()}
        self.described = {n: torch.empty(t.shape, dtype=dtypes[n], device="meta") for n, t in self.stored.items()}

    def read(self, name: str) -> torch.Tensor:
        file = self.stored[name].file
        with _named_in_errors(file), safe_open(file, "pt") as opened:
            return opened.get_tensor(name)


def open_checkpoint(local_dir: Path) -> TensorSource:
    """The source for a checkpoint's model folder (.../global_step_N/actor, or .../global_step_N of an SFT run)."""
    if not local_dir.is_dir():
        raise MergeError(f"--local_dir {local_dir} does not exist; expected .../global_step_<N>/actor.")
    if (local_dir / "model" / METADATA_FILE).is_file():
        return FSDPCheckpoint(local_dir)
    if content := sorted(local_dir.glob("model_world_size_*_rank_0.pt")):
        return RankFiles(local_dir, content[0])
    files = [*local_dir.glob(f"*/model/{METADATA_FILE}"), *local_dir.glob(f"*/*/model/{METADATA_FILE}")]
    folders = [file.parents[1] for file in files]
    newest = max(folders, key=lambda folder: (folder.name != "critic", folder.stat().st_mtime), default=None)
    inside = f" Did you mean --local_dir {newest}?" if newest is not None else ""
    raise MergeError(
        f"--local_dir {local_dir} holds neither model/{METADATA_FILE} nor model_world_size_<W>_rank_0.pt: "
        f"there is no checkpoint of a model.{inside}"
    )


def nbytes(described: Described) -> int:
    """Bytes of the described tensors."""
    return sum(prod(t.shape) * t.element_size() for t in described.values())


def _check_manifest(local_dir: Path) -> None:
    """Checks what will be read against the manifest of the step, where there is one."""
    for step, part in ((local_dir, ""), (local_dir.parent, f"{local_dir.name}/")):
        if (step / MANIFEST).is_file():
            verify_manifest(step, parts=[f"{part}{name}" for name in ("model/", "huggingface/", "lora_adapter/")])
            return
    if local_dir.parent.name.startswith("global_step_"):
        raise CheckpointCorruptError(f"{local_dir.parent}: no {MANIFEST}; the folder was not written to its end.")


def _rank_file(file: Path) -> dict[str, torch.Tensor]:
    with _named_in_errors(file):
        content = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
    if not isinstance(content, dict) or not all(isinstance(v, torch.Tensor) for v in content.values()):
        raise MergeError(f"{file} holds no state dict, {{name: tensor}}; save the module's state_dict() there.")
    return content


@contextmanager
def _named_in_errors(file: Path) -> Iterator[None]:
    """Whatever an incomplete or hostile file makes its reader raise, in one message that names the file."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise MergeError(f"{file} holds more than tensors and is not loaded: {one_line(error)}") from error
    except (MergeError, UntrustedMetadataError, WeightFileError):
        raise
    except Exception as error:  # an incomplete archive makes torch and safetensors raise almost anything
        raise MergeError(f"{file} is incomplete or not a file of weights: {one_line(error)}") from error
