"""Compatibility with verl: functions on TensorDicts, whose columns are tensors, jagged or not, or Python values.

A value per row is a NonTensorStack, a value of the full batch a NonTensorData. A batch that has values of the whole
batch alone has the batch size [].
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl.protocol.merge import *  # noqa: F403
from verl.protocol.merge import (
    DataProtoError,
    assign_non_tensor_data,
    assign_non_tensor_stack,
    cat_rows,
    index_select_tensor_dict,
    iterate_batches,
    same_column,
    unwrap_non_tensor_data,
)


def assign_non_tensor(tensor_dict: TensorDict, **kwargs: Any) -> TensorDict:
    """Set lists of B values as columns, NonTensorData and NonTensorStack as they are, and values of the full batch."""
    for key, value in kwargs.items():
        if isinstance(value, NonTensorData | NonTensorStack):
            tensor_dict.set(key, value)
        else:
            (assign_non_tensor_stack if isinstance(value, list) else assign_non_tensor_data)(tensor_dict, key, value)
    return tensor_dict


def get_tensordict(tensor_dict: dict[str, torch.Tensor | list], non_tensor_dict: dict | None = None) -> TensorDict:
    """A batch from tensors [B, ...] and lists of B values, with the values of the full batch in `non_tensor_dict`."""
    sizes = {k: v.size(0) if isinstance(v, torch.Tensor) else len(v) for k, v in tensor_dict.items()}
    first = next(iter(sizes), None)
    batch = TensorDict({}, batch_size=list(sizes.values())[:1])
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


def assert_tensordict_eq(tensordict1: TensorDict, tensordict2: TensorDict) -> None:
    """DataProtoError (an AssertionError) unless both have the same columns, with equal shapes and values."""
    if odd := sorted(set(tensordict1.keys()) ^ set(tensordict2.keys())):
        raise DataProtoError(f"only one of the batches has the columns {odd}")
    for key in tensordict1.keys():
        if not same_column(tensordict1.get(key), tensordict2.get(key)):
            raise DataProtoError(f"column {key!r} differs between the batches")


def make_iterator(
    tensordict: TensorDict, mini_batch_size: int, epochs: int, seed: int | None = None,
    dataloader_kwargs: dict | None = None,
) -> Iterator[TensorDict]:
    """Mini-batches [mini_batch_size] of the rows [B], `epochs` times; `dataloader_kwargs`: shuffle, drop_last, ..."""
    select = partial(index_select_tensor_dict, tensordict)
    return iterate_batches(len(tensordict), select, mini_batch_size, epochs, seed, dataloader_kwargs)


def get(tensordict: TensorDict, key: str, default: Any = None) -> Any:
    """A tensor [B, ...], the list of a column's B values, or a value of the full batch; `default` without the key."""
    if key not in tensordict.keys():
        return default
    value = tensordict.get(key)
    return value.tolist() if isinstance(value, NonTensorStack) else unwrap_non_tensor_data(value)


def get_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """The batch [B] with these columns only; KeyError naming a missing one."""
    keys = list(keys)
    if missing := [key for key in keys if key not in tensordict.keys()]:
        raise KeyError(f"{missing[0]!r} is not in the batch; it has {sorted(tensordict.keys())}")
    return tensordict.select(*keys)


def pop(tensordict: TensorDict, key: str, default: Any = None) -> Any:
    """As `get`, of the same shape, and remove the column."""
    value = get(tensordict, key, default)
    tensordict.pop(key, None)
    return value


def pop_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """As `get_keys`, of the same rows [B], and remove the columns."""
    taken = get_keys(tensordict, keys)
    tensordict.exclude(*taken.keys(), inplace=True)
    return taken


def pad_to_divisor(data: TensorDict, size_divisor: int) -> tuple[TensorDict, int]:
    """Append rows from the start, cyclically, [B] -> [B + added], a multiple of `size_divisor`; (batch, added)."""
    pad = -len(data) % size_divisor
    return (index_select_tensor_dict(data, [i % len(data) for i in range(len(data) + pad)]), pad) if pad else (data, 0)


def unpad(data: TensorDict, pad_size: int) -> TensorDict:
    """Drop the last `pad_size` rows: [B] -> [B - pad_size]."""
    return index_select_tensor_dict(data, list(range(len(data) - pad_size))) if pad_size else data
