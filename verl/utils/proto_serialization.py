"""Tensors and batches as plain arrays: the form in which a DataProto travels through Ray and lies on disk.

A tensor becomes (dtype name, shape, numpy array); types numpy lacks (bfloat16, float8) travel as integers of the same
width. Contiguous arrays go out of band with pickle protocol 5, so Ray's object store hands them on without a copy.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from tensordict import TensorDict

_DTYPES: dict[str, torch.dtype] = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
        torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
_CARRIER = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
_DOCUMENT = "__document__"
_TAG = "__kind__"


def serialize_single_tensor(obj: torch.Tensor) -> tuple[str, tuple[int, ...], np.ndarray]:
    """A tensor of any shape -> (dtype name, shape, C-contiguous numpy array on the CPU; shares memory where it can)."""
    if obj.is_nested or obj.layout != torch.strided:
        raise TypeError(f"a {obj.layout} tensor (nested: {obj.is_nested}) cannot travel in a DataProto; pad it first")
    dtype = str(obj.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise TypeError(f"a tensor of dtype {obj.dtype} cannot travel in a DataProto; known: {', '.join(_DTYPES)}")
    flat = obj.detach().cpu().contiguous()
    carrier = _CARRIER.get(obj.dtype)
    return dtype, tuple(obj.shape), (flat if carrier is None else flat.view(carrier)).resolve_conj().numpy()


def deserialize_single_tensor(arr: Any) -> torch.Tensor:
    """Inverse of `serialize_single_tensor`; the tensor shares the array's memory, so it may be read-only by nature."""
    dtype, shape, array = arr
    with warnings.catch_warnings():
        # Arrays from the object store are read-only; the owner's contract (DataProto's docstring) covers that.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(_DTYPES[dtype]).reshape(shape) if tensor.dtype != _DTYPES[dtype] else tensor.reshape(shape)


def serialize_tensordict(batch: TensorDict) -> tuple[tuple[int, ...], str | None, dict[str, tuple[str, Any]]]:
    """A flat TensorDict -> (batch size, device it was on, {key: serialised tensor})."""
    device = None if batch.device is None else str(batch.device)
    return tuple(batch.batch_size), device, {str(k): serialize_single_tensor(v) for k, v in batch.items()}


def deserialize_tensordict(arr: Any) -> TensorDict:
    """Inverse of `serialize_tensordict`; tensors arrive on the CPU, wherever they came from."""
    batch_size, _, tensors = arr
    source = {key: deserialize_single_tensor(value) for key, value in tensors.items()}
    return TensorDict(source, batch_size=list(batch_size))


class _Document:
    """Turns nested plain values into JSON, arrays inside them into entries of `arrays`, and back."""

    def __init__(self, arrays: dict[str, np.ndarray] | None = None):
        self.arrays = {} if arrays is None else arrays

    def _store(self, array: np.ndarray) -> str:
        name = f"value:{len(self.arrays)}"
        self.arrays[name] = np.array(array, order="C")
        return name

    def dump(self, value: Any, where: str) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.generic) and not isinstance(value, np.str_):
            return {_TAG: "scalar", "dtype": value.dtype.str, "array": self._store(np.asarray(value).reshape(1))}
        if isinstance(value, np.ndarray):
            if value.dtype.kind in "biufc":
                return {_TAG: "array", "dtype": value.dtype.str, "shape": value.shape, "array": self._store(value)}
            items = [self.dump(x, where) for x in value.ravel().tolist()]
            dtype = "O" if value.dtype == object else value.dtype.str
            return {_TAG: "objects", "dtype": dtype, "shape": value.shape, "items": items}
        if isinstance(value, torch.Tensor):
            dtype, shape, array = serialize_single_tensor(value)
            return {_TAG: "tensor", "dtype": dtype, "shape": shape, "array": self._store(array)}
        if isinstance(value, list):
            return [self.dump(x, where) for x in value]
        if isinstance(value, tuple):
            return {_TAG: "tuple", "items": [self.dump(x, where) for x in value]}
        if isinstance(value, dict):
            if all(isinstance(k, str) for k in value) and _TAG not in value:
                return {k: self.dump(v, f"{where}.{k}") for k, v in value.items()}
            return {_TAG: "dict", "items": [[self.dump(k, where), self.dump(v, where)] for k, v in value.items()]}
        raise TypeError(
            f"{where} holds a {type(value).__module__}.{type(value).__qualname__}, which cannot be written without "
            f"pickle; store numbers, text, lists, dicts, numpy arrays or tensors, or drop it with select()"
        )

    def load(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.load(x) for x in value]
        if not isinstance(value, dict):
            return value
        kind = value.get(_TAG)
        if kind is None:
            return {k: self.load(v) for k, v in value.items()}
        if kind == "scalar":
            return self.arrays[value["array"]].astype(value["dtype"])[0]
        if kind == "array":
            return self.arrays[value["array"]].astype(value["dtype"], copy=False).reshape(value["shape"])
        if kind == "objects":
            out = np.empty(len(value["items"]), dtype=value["dtype"])
            out[:] = object_array([self.load(x) for x in value["items"]])
            return out.reshape(value["shape"])
        if kind == "tensor":
            return deserialize_single_tensor((value["dtype"], tuple(value["shape"]), self.arrays[value["array"]]))
        if kind == "tuple":
            return tuple(self.load(x) for x in value["items"])
        if kind == "dict":
            return {self.load(k): self.load(v) for k, v in value["items"]}
        raise ValueError(f"unknown kind {kind!r} in a stored batch; it was written by a newer version")


def object_array(values: Any) -> np.ndarray:
    """A sequence of N values -> object array of shape [N], whatever the values are (lists of equal length included)."""
    out = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        out[i] = value
    return out


def save_parts(path: str | Path, batch: TensorDict | None, non_tensors: dict[str, np.ndarray], meta: dict) -> None:
    """Write the three parts of a DataProto as one safetensors file, the non-tensor part as JSON inside it."""
    document = _Document()
    columns = {}
    if batch is not None:
        for i, (key, tensor) in enumerate(batch.items()):
            dtype, shape, array = serialize_single_tensor(tensor)
            document.arrays[f"column:{i}"] = array
            columns[key] = {"dtype": dtype, "shape": shape, "array": f"column:{i}"}
    text = json.dumps(
        {
            "batch_size": None if batch is None else list(batch.batch_size),
            "columns": columns,
            "non_tensor_batch": {k: document.dump(v, f"non_tensor_batch[{k!r}]") for k, v in non_tensors.items()},
            "meta_info": document.dump(meta, "meta_info"),
        }
    )
    document.arrays[_DOCUMENT] = np.frombuffer(text.encode(), dtype=np.uint8)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    save_file(document.arrays, str(unfinished), metadata={"format": "verl.DataProto", "version": "1"})
    os.replace(unfinished, path)


def load_parts(path: str | Path) -> tuple[TensorDict | None, dict[str, np.ndarray], dict]:
    """Read what `save_parts` wrote; ValueError when the file is something else."""
    with safe_open(str(path), framework="np") as file:
        header = file.metadata() or {}
        if header.get("format") != "verl.DataProto":
            raise ValueError(f"{path} is not a stored DataProto; write it with DataProto.save_to_disk")
        arrays = {name: file.get_tensor(name) for name in file.keys()}
    stored = json.loads(arrays.pop(_DOCUMENT).tobytes().decode())
    document = _Document(arrays)
    batch = None
    if stored["batch_size"] is not None:
        columns = {k: (c["dtype"], tuple(c["shape"]), arrays[c["array"]]) for k, c in stored["columns"].items()}
        batch = deserialize_tensordict((stored["batch_size"], None, columns))
    non_tensors = {k: document.load(v) for k, v in stored["non_tensor_batch"].items()}
    return batch, non_tensors, document.load(stored["meta_info"])
