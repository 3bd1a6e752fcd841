"""Batches as TensorDicts: tensors [B, ...], jagged nested tensors [B, j, ...], Python values per row or per batch.

A value per row is a NonTensorStack, a value of the full batch a NonTensorData. A batch that has values of the whole
batch alone has the batch size [].
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl.protocol.merge import DataProtoError, cat_rows, mini_batches, select_rows
from verl.utils.py_functional import deep_equal


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


def assign_non_tensor(tensor_dict: TensorDict, **kwargs: Any) -> None:
    """Set columns (lists of B values) and values of the full batch (everything else) by name."""
    for key, value in kwargs.items():
        (assign_non_tensor_stack if isinstance(value, list) else assign_non_tensor_data)(tensor_dict, key, value)


def unwrap_non_tensor_data(data: Any) -> Any:
    """The value in a NonTensorData; anything else as it is."""
    return data.data if isinstance(data, NonTensorData) else data


def get_non_tensor_data(data: TensorDict, key: str, default: Any) -> Any:
    """A value of the full batch [B], or `default`."""
    return unwrap_non_tensor_data(data.get(key, default))


def get_tensordict(tensor_dict: dict[str, torch.Tensor | list], non_tensor_dict: dict | None = None) -> TensorDict:
    """A batch from tensors [B, ...] and lists of B values, with the values of the full batch in `non_tensor_dict`.

    Raises DataProtoError (an AssertionError) if the lengths differ or a nested tensor is not jagged and contiguous.
    """
    sizes = {k: v.size(0) if isinstance(v, torch.Tensor) else len(v) for k, v in tensor_dict.items()}
    first = next(iter(sizes), None)
    batch = TensorDict({}, batch_size=[] if first is None else [sizes[first]])
    for key, value in tensor_dict.items():
        if sizes[key] != sizes[first]:
            raise DataProtoError(f"column {key!r} has {sizes[key]} rows, but {first!r} has {sizes[first]}")
        if isinstance(value, torch.Tensor):
            if value.is_nested and not (value.layout == torch.jagged and value.is_contiguous()):
                raise DataProtoError(f"nested tensor {key!r} must be contiguous and of the layout torch.jagged")
            batch.set(key, value)
        else:
            assign_non_tensor_stack(batch, key, list(value))
    for key, value in (non_tensor_dict or {}).items():
        assign_non_tensor_data(batch, key, value)
    return batch


def concat_nested_tensors(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Jagged tensors [B_i, j, ...] -> one of [sum B_i, j, ...]."""
    for tensor in tensors:
        if not tensor.is_nested:
            raise DataProtoError(f"expected nested tensors, got one of shape {tuple(tensor.shape)}")
    return cat_rows(tensors)


def concat_tensordict_with_none_bsz(data: list[TensorDict]) -> TensorDict:
    """The first of batches of shape [] that only hold values of the full batch; DataProtoError if another has rows."""
    for batch in data:
        if len(batch.batch_size):
            raise DataProtoError(f"expected batches without rows, got the batch size {tuple(batch.batch_size)}")
    return data[0]


def concat_tensordict(data: list[TensorDict]) -> TensorDict:
    """All rows in order, [B_i, ...] -> [sum of B_i, ...]; values of the full batch are those of the first part."""
    if not data:
        raise DataProtoError("concat of an empty list of TensorDicts")
    if not len(data[0].batch_size):
        return concat_tensordict_with_none_bsz(data)
    for part in data[1:]:
        if odd := sorted(set(data[0].keys()) ^ set(part.keys())):
            raise DataProtoError(f"concat: not all parts have the columns {odd}")
    joined = TensorDict({}, batch_size=[sum(len(part) for part in data)], device=data[0].device)
    for key in data[0].keys():
        values = [part.get(key) for part in data]
        if isinstance(values[0], NonTensorStack):
            assign_non_tensor_stack(joined, key, [row for value in values for row in value.tolist()])
        elif isinstance(values[0], NonTensorData):
            assign_non_tensor_data(joined, key, values[0].data)
        else:
            joined.set(key, cat_rows(values))
    return joined


def index_select_tensor_dict(batch: TensorDict, indices: torch.Tensor | list[int]) -> TensorDict:
    """The rows with these numbers [N], in this order; a row may be taken more than once."""
    rows = torch.as_tensor(indices, dtype=torch.long)
    if rows.ndim != 1:
        raise DataProtoError(f"rows are selected by a 1-D list of numbers, not by one of shape {tuple(rows.shape)}")
    selected = TensorDict({}, batch_size=[len(rows)], device=batch.device)
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


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the second batch's columns [B, ...] to the first, in place; a column in both must be equal."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = f"{tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}"
        raise DataProtoError(f"union of batches of size {sizes}; both need the same rows")
    for key in tensor_dict2.keys():
        value = tensor_dict2.get(key)
        if key not in tensor_dict1.keys():
            tensor_dict1.set(key, value)
        elif not _equal(tensor_dict1.get(key), value):
            raise DataProtoError(f"union: column {key!r} differs between the batches; pop or rename one of them")
    return tensor_dict1


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, NonTensorStack | NonTensorData) or isinstance(other, NonTensorStack | NonTensorData):
        return type(one) is type(other) and deep_equal(one.tolist(), other.tolist())
    return one.dtype == other.dtype and deep_equal(one, other)


def assert_tensordict_eq(tensordict1: TensorDict, tensordict2: TensorDict) -> None:
    """DataProtoError (an AssertionError) unless both have the same columns, with equal shapes and values."""
    if odd := sorted(set(tensordict1.keys()) ^ set(tensordict2.keys())):
        raise DataProtoError(f"only one of the batches has the columns {odd}")
    for key in tensordict1.keys():
        if not _equal(tensordict1.get(key), tensordict2.get(key)):
            raise DataProtoError(f"column {key!r} differs between the batches")


def make_iterator(
    tensordict: TensorDict, mini_batch_size: int, epochs: int, seed: int | None = None,
    dataloader_kwargs: dict | None = None,
) -> Iterator[TensorDict]:
    """Mini-batches [mini_batch_size] of the rows [B], `epochs` times; `dataloader_kwargs`: shuffle, drop_last, ..."""
    select = partial(index_select_tensor_dict, tensordict)
    return mini_batches(len(tensordict), select, mini_batch_size, epochs, seed, dataloader_kwargs)


def get(tensordict: TensorDict, key: str, default: Any = None) -> Any:
    """A tensor [B, ...], the list of a column's B values, or a value of the full batch; `default` without the key."""
    if key not in tensordict.keys():
        return default
    value = tensordict.get(key)
    return value.tolist() if isinstance(value, NonTensorStack) else unwrap_non_tensor_data(value)


def get_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """The batch [B] with these columns only; KeyError naming a missing one."""
    keys = list(keys)
    for key in keys:
        if key not in tensordict.keys():
            raise KeyError(f"{key!r} is not in the batch; it has {sorted(tensordict.keys())}")
    columns = {key: tensordict.get(key) for key in keys}
    return TensorDict(columns, batch_size=tensordict.batch_size, device=tensordict.device)


def pop(tensordict: TensorDict, key: str, default: Any = None) -> Any:
    """As `get`, of the same shape, and remove the column."""
    value = get(tensordict, key, default)
    if key in tensordict.keys():
        tensordict.pop(key)
    return value


def pop_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """As `get_keys`, of the same rows [B], and remove the columns."""
    taken = get_keys(tensordict, keys)
    for key in taken.keys():
        tensordict.pop(key)
    return taken


def pad_to_divisor(data: TensorDict, size_divisor: int) -> tuple[TensorDict, int]:
    """Append rows from the start, cyclically, [B] -> [B + added], a multiple of `size_divisor`; (batch, added)."""
    if not isinstance(data, TensorDict):
        raise DataProtoError(f"expected a TensorDict, got a {type(data).__name__}")
    pad = -len(data) % size_divisor
    return (index_select_tensor_dict(data, [i % len(data) for i in range(len(data) + pad)]), pad) if pad else (data, 0)


def unpad(data: TensorDict, pad_size: int) -> TensorDict:
    """Drop the last `pad_size` rows: [B] -> [B - pad_size]."""
    return index_select_tensor_dict(data, list(range(len(data) - pad_size))) if pad_size else data
