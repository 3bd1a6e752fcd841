"""How parts of batches are put together: unions column by column, joins row by row, the errors when they clash."""

from __future__ import annotations

import os

import numpy as np
import torch
from tensordict import TensorDict

from verl.utils.py_functional import deep_equal


class DataProtoError(ValueError, AssertionError):
    """A batch that breaks a rule (an AssertionError too: that is what callers written for upstream catch)."""


class _PaddingSwitch(type):
    @property
    def auto_padding(cls) -> bool:
        return cls._auto_padding or os.environ.get("VERL_AUTO_PADDING", "false").lower() in ("1", "true")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"DataProtoConfig.auto_padding={enabled!r} must be a bool")
        cls._auto_padding = enabled


class DataProtoConfig(metaclass=_PaddingSwitch):
    """Process-wide switch: with `auto_padding`, dispatching an uneven batch pads it; without, it is an error."""

    _auto_padding = False
    auto_padding_key = "_verl_auto_padding"


def cat_tensors(parts: list[TensorDict | None]) -> TensorDict | None:
    """Rows of all parts in order: tensors [B_i, ...] -> [sum B_i, ...]."""
    first = parts[0]
    if first is None or any(part is None for part in parts):
        if any(part is not None for part in parts):
            raise DataProtoError("concat of DataProto with and without tensors; select the same columns first")
        return None
    keys = set(first.keys())
    for number, part in enumerate(parts):
        if set(part.keys()) != keys:
            odd = sorted(keys ^ set(part.keys()))
            raise DataProtoError(f"concat: part {number} and part 0 do not both have the tensors {odd}")
        for key in keys:
            if part[key].shape[1:] != first[key].shape[1:]:
                raise DataProtoError(
                    f"concat: tensor {key!r} is {tuple(first[key].shape)} in part 0 and "
                    f"{tuple(part[key].shape)} in part {number}; pad them to one length"
                )
    size = [sum(part.batch_size[0] for part in parts), *first.batch_size[1:]]
    merged = {key: torch.cat([part[key] for part in parts], dim=0) for key in first.keys()}
    return TensorDict(merged, batch_size=size, device=first.device)


def cat_columns(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Rows of all parts in order: columns [B_i, ...] -> [sum B_i, ...]."""
    keys = parts[0].keys()
    for number, part in enumerate(parts):
        if part.keys() != keys:
            odd = sorted(keys ^ part.keys())
            raise DataProtoError(f"concat: part {number} and part 0 do not both have the columns {odd}")
    return {key: np.concatenate([part[key] for part in parts], axis=0) for key in keys}


def merge_meta(metas: list[dict]) -> dict:
    """One meta_info from many: equal values stay, `metrics` are gathered into a dict of lists."""
    merged, metrics = {}, {}
    for number, meta in enumerate(metas):
        for key, value in meta.items():
            if key == "metrics":
                for entry in value if isinstance(value, list | tuple) else [value]:
                    for name, number_or_list in entry.items():
                        many = list(number_or_list) if isinstance(number_or_list, list | tuple) else [number_or_list]
                        metrics.setdefault(name, []).extend(many)
            elif key in merged and not deep_equal(merged[key], value):
                raise DataProtoError(
                    f"concat: meta_info[{key!r}] is {merged[key]!r} in one part and {value!r} in part {number}; "
                    f"what differs between ranks belongs in `metrics` or in a column"
                )
            else:
                merged[key] = value
    if any("metrics" in meta for meta in metas):
        merged["metrics"] = metrics
    return merged


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Columns of both; a shared column must be equal (DataProtoError names it and both shapes)."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = tuple(tensor_dict1.batch_size), tuple(tensor_dict2.batch_size)
        raise DataProtoError(f"union of batches of size {sizes[0]} and {sizes[1]}; both need the same rows")
    merged = dict(tensor_dict1.items())
    for key, value in tensor_dict2.items():
        here = merged.setdefault(key, value)
        if here is not value and not _same_tensor(here, value):
            raise DataProtoError(
                f"union: tensor {key!r} differs between the sides (shapes {tuple(here.shape)} and "
                f"{tuple(value.shape)}, types {here.dtype} and {value.dtype}); pop or rename one of them"
            )
    return TensorDict(merged, batch_size=tensor_dict1.batch_size, device=tensor_dict1.device)


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.device == b.device:
        return True
    b = b.to(a.device)
    return torch.equal(a, b) or (a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def union_numpy_dict(
    tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Add the second dict's columns to the first, in place; a shared column must be equal, NaN equal to NaN."""
    for key, value in tensor_dict2.items():
        here = tensor_dict1.setdefault(key, value)
        if not isinstance(value, np.ndarray) or not isinstance(here, np.ndarray):
            raise DataProtoError(f"union: column {key!r} must be a numpy array on both sides")
        if not deep_equal(here, value):
            raise DataProtoError(
                f"union: column {key!r} differs between the sides (shapes {here.shape} and {value.shape}); "
                f"pop or rename one of them"
            )
    return tensor_dict1


def list_of_dict_to_dict_of_list(list_of_dict: list[dict]) -> dict[str, list]:
    """[{a: 1}, {a: 2}] -> {a: [1, 2]}; every dict must have the same keys."""
    if not list_of_dict:
        return {}
    keys = list_of_dict[0].keys()
    for number, entry in enumerate(list_of_dict):
        if entry.keys() != keys:
            raise DataProtoError(f"entry {number} has keys {sorted(entry)}, entry 0 has {sorted(keys)}")
    return {key: [entry[key] for entry in list_of_dict] for key in keys}
