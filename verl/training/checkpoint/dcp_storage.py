"""Reads torch's distributed checkpoints without trusting their pickled metadata."""

import io
import os
import pickle
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from verl.training.checkpoint.publish import CheckpointCorruptError
from verl.utils.problems import one_line

METADATA_FILE = ".metadata"
#: module -> its classes and functions that the metadata of a checkpoint of plain tensors names
_ALLOWED = {
    "collections": {"OrderedDict"}, "pathlib": {"PosixPath", "PurePosixPath"},
    "torch": {"Size"}, "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "_MEM_FORMAT_ENCODING",
    },
}  # fmt: skip


class UntrustedMetadataError(RuntimeError):
    """A checkpoint's metadata names something that no checkpoint of tensors needs."""


class _AllowListUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, source: Path):
        super().__init__(io.BytesIO(data))
        self.source = source

    def find_class(self, module: str, name: str):
        module = "pathlib" if module == "pathlib._local" else module  # its name in Python 3.13
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and name not in _ALLOWED.get(module, ()):
            what = f"{module}.{name}, which no checkpoint of tensors needs"
            raise UntrustedMetadataError(f"{self.source} refers to {what}; it is not loaded.")
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """FileSystemReader whose metadata passes an allow-list; tensors are read with weights_only=True by torch."""

    def read_metadata(self, *args, **kwargs) -> Metadata:
        metadata = read_metadata(self.path)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(folder: str | os.PathLike) -> Metadata:
    """The metadata of the distributed checkpoint in `folder`.

    Raises FileNotFoundError without one, UntrustedMetadataError if it names anything but tensors in files of `folder`.
    """
    file = Path(folder) / METADATA_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is not a distributed checkpoint: it has no {METADATA_FILE} file")
    try:
        metadata = _AllowListUnpickler(file.read_bytes(), file).load()
        if not isinstance(metadata, Metadata):
            raise UntrustedMetadataError(f"{file} holds a {type(metadata).__name__}, not a checkpoint's metadata.")
        for name, described in metadata.state_dict_metadata.items():
            if not isinstance(described, TensorStorageMetadata):
                raise UntrustedMetadataError(f"{file}: {name!r} is not a tensor.")
        for info in metadata.storage_data.values():
            if os.path.basename(info.relative_path) != info.relative_path:
                raise UntrustedMetadataError(f"{file} points to {info.relative_path!r}, outside of its folder.")
    except UntrustedMetadataError:
        raise
    except Exception as error:  # damaged bytes make an unpickler raise almost anything, or fields of other types
        raise UntrustedMetadataError(f"{file} is not a checkpoint's metadata: {one_line(error)}") from error
    return metadata


def save_tensors(
    tensors: dict[str, torch.Tensor], folder: str | os.PathLike, group: dist.ProcessGroup | None = None
) -> None:
    """Writes tensors of any shape, sharded or the same on all ranks, as one distributed checkpoint. All ranks call it.

    `group` coordinates the ranks; None is the default group. Raises OSError when a file could not be written.
    """
    try:
        dcp.save(tensors, storage_writer=FileSystemWriter(folder, sync_files=True), process_group=group)
    except CheckpointException as error:  # a BaseException: no `except Exception` above would see it
        # torch's archive writer reports a failed write as an unexpected position
        raise OSError(f"{folder} could not be written: {error}") from error


def load_tensors(tensors: dict[str, torch.Tensor], folder: str | os.PathLike) -> None:
    """Fills the given tensors, of the saved (global) shapes and each sharded in its own way, in place; on all ranks.

    Raises CheckpointCorruptError when a file does not hold the tensors that the metadata lists.
    """
    try:
        dcp.load(tensors, storage_reader=SafeReader(folder))
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))  # of a rank: its error, the traceback
        raise CheckpointCorruptError(f"{folder} holds a file that is not loaded: {one_line(first)}") from error
