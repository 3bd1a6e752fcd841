"""How columns and rows of batches are put together, compared, padded and folded, with the errors when they clash."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from verl.protocol import DataProto


class DataProtoError(ValueError, AssertionError):
    """A batch that breaks a rule (an AssertionError too: that is what callers written for upstream catch)."""


class DataProtoConfig:
    """Process-wide switch: with `auto_padding`, dispatching an uneven batch pads it; without, it is an error."""

    auto_padding = os.environ.get("VERL_AUTO_PADDING", "false").lower() in ("1", "true")
    auto_padding_key = "_verl_auto_padding"


def cat_rows(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Tensors [B_i, ...], all of them jagged or none -> [sum B_i, ...]."""
    if any(tensor.is_nested for tensor in tensors):
        rows = [row for tensor in tensors for row in tensor.unbind()]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return torch.cat(tensors, dim=0)


def select_rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor [B, ...], jagged or not, by number [N] -> [N, ...], a copy."""
    if tensor.is_nested:
        parts = tensor.unbind()
        return torch.nested.as_nested_tensor([parts[i] for i in rows.tolist()], layout=torch.jagged)
    return tensor.index_select(0, rows.to(tensor.device))


def check_same_keys(parts: list) -> None:
    """DataProtoError unless all parts have the names of the first."""
    for number, part in enumerate(parts):
        odd = sorted(set(parts[0].keys()) ^ set(part.keys()))
        if odd:
            raise DataProtoError(f"concat: part {number} and part 0 do not both have the columns {odd}")


def merge_meta(metas: list[dict]) -> dict:
    """One meta_info from many: equal values stay, `metrics` are gathered into a dict of lists."""
    merged, metrics = {}, {}
    for number, meta in enumerate(metas):
        for key, value in meta.items():
            if key == "metrics":
                for entry in _listed(value):
                    for name, values in entry.items():
                        metrics.setdefault(name, []).extend(_listed(values))
            elif key in merged and not deep_equal(merged[key], value):
                raise DataProtoError(
                    f"concat: meta_info[{key!r}] is {merged[key]!r} in one part and {value!r} in part {number}; "
                    f"what differs between ranks belongs in `metrics` or in a column"
                )
            else:
                merged[key] = value
    return {**merged, "metrics": metrics} if any("metrics" in meta for meta in metas) else merged


def _listed(value: object) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]


def deep_equal(a: Any, b: Any) -> bool:
    """Equality of nested arrays, tensors, dicts and lists, in which NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or a.shape != b.shape:
            return False
        if a.dtype != object and b.dtype != object:
            return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc"))
        return all(deep_equal(x, y) for x, y in zip(a.ravel(), b.ravel(), strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(deep_equal(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(deep_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.is_nested or b.is_nested:
            return a.is_nested and b.is_nested and deep_equal(a.unbind(), b.unbind())
        b = b.to(a.device)
        return a.shape == b.shape and (torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()))
    return bool(a == b) or bool(a != a and b != b)


def same_column(one: Any, other: Any) -> bool:
    """Equality of two columns of TensorDicts: tensors [B, ...] of one type, or Python values; NaN equals NaN."""
    if isinstance(one, NonTensorStack | NonTensorData) or isinstance(other, NonTensorStack | NonTensorData):
        return type(one) is type(other) and deep_equal(one.tolist(), other.tolist())
    return one.dtype == other.dtype and deep_equal(one, other)


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the columns [B, ...] of the second batch to the first, in place; a shared column must be equal."""
    here, there = tuple(tensor_dict1.batch_size), tuple(tensor_dict2.batch_size)
    if here != there:
        raise DataProtoError(f"union of batches of size {here} and {there}; both need the same rows")
    shared = tensor_dict1.keys() & tensor_dict2.keys()
    for key in sorted(shared):
        one, other = tensor_dict1.get(key), tensor_dict2.get(key)
        if not same_column(one, other):
            raise DataProtoError(
                f"union: tensor {key!r} differs between the sides (shapes {tuple(one.shape)} and "
                f"{tuple(other.shape)}, types {one.dtype} and {other.dtype}); pop or rename one of them"
            )
    for key in tensor_dict2.keys():
        if key not in shared:
            tensor_dict1.set(key, tensor_dict2.get(key))
    return tensor_dict1


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add the second dict's columns [B, ...] to the first, in place; a shared one must be equal (NaN equals NaN)."""
    for key, value in tensor_dict2.items():
        here = tensor_dict1.setdefault(key, value)
        if not isinstance(value, np.ndarray) or not isinstance(here, np.ndarray):
            raise DataProtoError(f"union: column {key!r} must be a numpy array on both sides")
        if not deep_equal(here, value):
            shapes = f"shapes {here.shape} and {value.shape}"
            raise DataProtoError(f"union: column {key!r} differs between the sides ({shapes}); pop or rename one")
    return tensor_dict1


def assign_non_tensor_data(tensor_dict: TensorDict, key: str, val: Any) -> None:
    """Set a value of the full batch [B], such as a temperature."""
    tensor_dict.set(key, NonTensorData(val, batch_size=tensor_dict.batch_size))


def assign_non_tensor_stack(tensor_dict: TensorDict, key: str, val: list) -> None:
    """Set a column of one Python value per row, which may be lists, dicts or None."""
    if not isinstance(val, list):
        raise DataProtoError(f"column {key!r} must be a list with one value per row, not a {type(val).__name__}")
    if len(tensor_dict.batch_size) and len(val) != len(tensor_dict):
        raise DataProtoError(f"column {key!r} has {len(val)} values for {len(tensor_dict)} rows")
    tensor_dict.set(key, NonTensorStack(*(NonTensorData(value) for value in val)))


def unwrap_non_tensor_data(data: Any) -> Any:
    """The value in a NonTensorData; anything else as it is."""
    return data.data if isinstance(data, NonTensorData) else data


def get_non_tensor_data(data: TensorDict, key: str, default: Any) -> Any:
    """A value of the full batch [B], or `default`."""
    return unwrap_non_tensor_data(data.get(key, default))


def concat_tensordict_with_none_bsz(data: list[TensorDict]) -> TensorDict:
    """The first of batches of shape [] that only hold values of the full batch; DataProtoError if another has rows."""
    for batch in data:
        if len(batch.batch_size):
            raise DataProtoError(f"expected batches without rows, got the batch size {tuple(batch.batch_size)}")
    return data[0]


def concat_tensordict(data: list[TensorDict]) -> TensorDict:
    """All rows in order, [B_i, ...] -> [sum of B_i, ...]; values of the full batch are those of the first part.

    DataProtoError if parts differ in their columns or in the shape of a column's rows.
    """
    if not data:
        raise DataProtoError("concat of an empty list of TensorDicts")
    first = data[0]
    if not len(first.batch_size):
        return concat_tensordict_with_none_bsz(data)
    check_same_keys(data)
    rows = sum(len(part) for part in data)
    joined = TensorDict({}, batch_size=[rows, *first.batch_size[1:]], device=first.device)
    for key in first.keys():
        values = [part.get(key) for part in data]
        if isinstance(values[0], NonTensorStack):
            assign_non_tensor_stack(joined, key, [row for value in values for row in value.tolist()])
        elif isinstance(values[0], NonTensorData):
            assign_non_tensor_data(joined, key, values[0].data)
        else:
            _check_same_width(key, values)
            joined.set(key, cat_rows(values))
    return joined


def _check_same_width(key: str, tensors: list[torch.Tensor]) -> None:
    """DataProtoError unless padded tensors [B_i, ...] agree in all dimensions but the first."""
    for number, tensor in enumerate(tensors):
        if not tensors[0].is_nested and tensor.shape[1:] != tensors[0].shape[1:]:
            raise DataProtoError(
                f"concat: tensor {key!r} is {tuple(tensors[0].shape)} in part 0 and {tuple(tensor.shape)} in part "
                f"{number}; pad them to one length"
            )


def index_select_tensor_dict(batch: TensorDict, indices: torch.Tensor | list[int]) -> TensorDict:
    """The rows with these numbers [N], in this order; a row may be taken more than once."""
    rows = torch.as_tensor(indices, dtype=torch.long)
    if rows.ndim != 1:
        raise DataProtoError(f"rows are selected by a 1-D list of numbers, not by one of shape {tuple(rows.shape)}")
    selected = TensorDict({}, batch_size=[len(rows), *batch.batch_size[1:]], device=batch.device)
    for key in batch.keys():
        value = batch.get(key)
        if isinstance(value, NonTensorStack):
            values = value.tolist()
            assign_non_tensor_stack(selected, key, [values[i] for i in rows.tolist()])
        elif isinstance(value, NonTensorData):
            assign_non_tensor_data(selected, key, value.data)
        else:
            selected.set(key, select_rows(value, rows))
    return selected


def chunk_tensordict(td: TensorDict, chunks: int) -> list[TensorDict]:
    """`chunks` consecutive parts [B / chunks]; DataProtoError if `chunks` does not divide the rows [B]."""
    if chunks < 1 or len(td) % chunks:
        raise DataProtoError(f"{len(td)} rows cannot be divided into {chunks} equal chunks")
    size = len(td) // chunks
    return [td[i * size : (i + 1) * size] for i in range(chunks)]


def list_of_dict_to_dict_of_list(list_of_dict: list[dict]) -> dict[str, list]:
    """[{a: 1}, {a: 2}] -> {a: [1, 2]}; every dict must have the same keys."""
    keys = list_of_dict[0].keys() if list_of_dict else ()
    for number, entry in enumerate(list_of_dict):
        if entry.keys() != keys:
            raise DataProtoError(f"entry {number} has keys {sorted(entry)}, entry 0 has {sorted(keys)}")
    return {key: [entry[key] for entry in list_of_dict] for key in keys}


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows from the start, cyclically, until len is a multiple of `size_divisor`; returns (data, rows added)."""
    pad = -len(data) % size_divisor
    return (data.select_idxs(np.arange(len(data) + pad) % len(data)), pad) if pad else (data, 0)


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows."""
    return data[: len(data) - pad_size] if pad_size else data


def iterate_batches(
    rows: int, select: Callable[[list[int]], Any], size: int, epochs: int, seed: int | None, kwargs: dict | None
) -> Iterator[Any]:
    """`select(row numbers)` for each mini-batch of `size` rows, `epochs` times; kwargs go to the DataLoader."""
    if rows % size:
        raise DataProtoError(f"{rows} rows cannot be divided into mini-batches of {size}")
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader = DataLoader(range(rows), batch_size=size, collate_fn=select, generator=generator, **(kwargs or {}))
    return (batch for _ in range(epochs) for batch in loader)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Two batch dimensions from one: tensors [B, ...] -> [new, B/new, ...], as are columns."""
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise DataProtoError(f"{len(data)} rows cannot be folded into {new_batch_size}")
    size = (new_batch_size, len(data) // new_batch_size)
    columns = {k: v.reshape(*size, *v.shape[1:]) for k, v in data.non_tensor_batch.items()}
    batch = None
    if data.batch is not None:
        batch = TensorDict({k: v.reshape(*size, *v.shape[1:]) for k, v in data.batch.items()}, batch_size=size[:1])
    return type(data)(batch, columns, data.meta_info)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Inverse of `fold_batch_dim`: the first `batch_dims` dimensions become one."""
    tensors = {} if data.batch is None else data.batch
    flat = {k: v.flatten(0, batch_dims - 1) for k, v in tensors.items()}
    columns = {k: v.reshape(-1, *v.shape[batch_dims:]) for k, v in data.non_tensor_batch.items()}
    return type(data).from_dict(flat, columns, data.meta_info)
