"""Tensors and batches as plain arrays: the form in which a DataProto travels through Ray and is stored on disk.

A tensor becomes (dtype name, shape, numpy array); types numpy lacks (bfloat16, float8) travel as integers of the same
width. Contiguous arrays go out of band with pickle protocol 5, so Ray's object store hands them on without a copy.
"""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tensordict import TensorDict

_CARRIER = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
_DOCUMENT = "__document__"
_TAG = "__kind__"


def serialize_single_tensor(obj: torch.Tensor) -> tuple[str, tuple[int, ...], Any]:
    """A tensor of any shape -> (dtype name, shape, C-contiguous numpy array on the CPU; shares memory where it can).

    A jagged nested tensor becomes ("jagged", (number of the jagged dimension,), (its values, its offsets)), a strided
    one ("nested", (), its tensors), all of these in the form above.
    """
    if obj.is_nested and obj.layout == torch.strided:
        return "nested", (), [serialize_single_tensor(part) for part in obj.unbind()]
    if obj.layout == torch.jagged:
        if obj.lengths() is not None:  # a view with gaps between its rows
            obj = torch.nested.as_nested_tensor(list(obj.unbind()), layout=torch.jagged)
        parts = (serialize_single_tensor(obj.values()), serialize_single_tensor(obj.offsets()))
        return "jagged", (obj._ragged_idx,), parts
    if obj.layout != torch.strided:
        raise TypeError(f"a {obj.layout} tensor cannot travel in a DataProto; use its to_dense()")
    flat = obj.detach().cpu().contiguous()
    array = flat.view(_CARRIER.get(obj.dtype, obj.dtype)).resolve_conj().numpy()
    return str(obj.dtype).removeprefix("torch."), tuple(obj.shape), array


def deserialize_single_tensor(arr: Any) -> torch.Tensor:
    """Inverse of `serialize_single_tensor`; the tensor shares the array's memory, so it may be read-only by nature."""
    dtype, shape, array = arr
    if dtype == "jagged":
        values, offsets = map(deserialize_single_tensor, array)
        return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=shape[0])
    if dtype == "nested":
        return torch.nested.nested_tensor([deserialize_single_tensor(part) for part in array], layout=torch.strided)
    with warnings.catch_warnings():
        # Arrays from the object store are read-only; the owner's contract (DataProto's docstring) covers that.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(getattr(torch, dtype)).reshape(shape)


def serialize_tensordict(batch: TensorDict) -> tuple[tuple[int, ...], str | None, dict[str, tuple[str, Any]]]:
    """A flat TensorDict, tensors of any shape -> (batch size, its device, {key: serialised tensor})."""
    device = None if batch.device is None else str(batch.device)
    return tuple(batch.batch_size), device, {str(k): serialize_single_tensor(v) for k, v in batch.items()}


def deserialize_tensordict(arr: Any) -> TensorDict:
    """Inverse of `serialize_tensordict`. Tensors arrive on the CPU, wherever they came from; no device stays none."""
    batch_size, device, tensors = arr
    columns = {k: deserialize_single_tensor(v) for k, v in tensors.items()}
    return TensorDict(columns, batch_size=list(batch_size), device=None if device is None else "cpu")


class _Document:
    """Turns nested plain values into JSON, arrays inside them into entries of `arrays`, and back."""

    def __init__(self, arrays: dict[str, np.ndarray] | None = None):
        self.arrays = {} if arrays is None else arrays

    def _store(self, kind: str, dtype: str, shape: tuple[int, ...], array: np.ndarray) -> dict[str, Any]:
        name = f"value:{len(self.arrays)}"
        self.arrays[name] = np.ascontiguousarray(array)
        return {_TAG: kind, "dtype": dtype, "shape": shape, "array": name}

    def dump(self, value: Any, where: str) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.generic | np.ndarray):
            if value.dtype.kind in "biufc":
                kind = "array" if isinstance(value, np.ndarray) else "scalar"
                return self._store(kind, value.dtype.str, value.shape, np.asarray(value))
            items = [self.dump(x, where) for x in value.ravel().tolist()]
            return {_TAG: "objects", "dtype": value.dtype.str, "shape": value.shape, "items": items}
        if isinstance(value, torch.Tensor):
            dtype, shape, data = serialize_single_tensor(value)
            if dtype == "jagged":
                return {_TAG: dtype, "dim": shape[0], "parts": [self._store("tensor", *part) for part in data]}
            if dtype == "nested":
                raise TypeError(f"{where}: a nested tensor of layout torch.strided cannot be stored; use torch.jagged")
            return self._store("tensor", dtype, shape, data)
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
        if _TAG not in value:
            return {k: self.load(v) for k, v in value.items()}
        kind = value[_TAG]
        if kind == "jagged":
            return torch.nested.nested_tensor_from_jagged(*map(self.load, value["parts"]), jagged_dim=value["dim"])
        if kind == "tensor":
            return deserialize_single_tensor((value["dtype"], tuple(value["shape"]), self.arrays[value["array"]]))
        if kind in ("array", "scalar"):
            array = self.arrays[value["array"]].astype(value["dtype"], copy=False).reshape(value["shape"])
            return array if kind == "array" else array[()]
        items = self.load(value["items"])
        if kind == "objects":
            return object_array(items).astype(value["dtype"]).reshape(value["shape"])
        return {"tuple": tuple, "dict": dict}[kind](items)


def object_array(values: Any) -> np.ndarray:
    """A sequence of N values -> object array of shape [N], whatever the values are (lists of equal length included)."""
    return np.fromiter(values, dtype=object, count=len(values))


def save_parts(path: str | Path, batch: TensorDict | None, non_tensors: dict[str, np.ndarray], meta: dict) -> None:
    """Write the parts of a DataProto, columns [B, ...], as one safetensors file with the non-tensor part as JSON."""
    document = _Document()
    text = json.dumps(
        {
            "batch_size": None if batch is None else list(batch.batch_size),
            "columns": document.dump({} if batch is None else dict(batch.items()), "batch"),
            "non_tensor_batch": document.dump(non_tensors, "non_tensor_batch"),
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
    try:
        with safe_open(str(path), framework="np") as file:
            known = (file.metadata() or {}).get("format") == "verl.DataProto"
            arrays = {name: file.get_tensor(name) for name in file.keys()} if known else {}
    except SafetensorError:
        known = False
    if not known:
        raise ValueError(f"{path} is not a stored DataProto; write it with DataProto.save_to_disk")
    stored = _Document(arrays).load(json.loads(arrays.pop(_DOCUMENT).tobytes().decode()))
    size = stored["batch_size"]
    batch = None if size is None else TensorDict(stored["columns"], batch_size=size)
    return batch, stored["non_tensor_batch"], stored["meta_info"]
