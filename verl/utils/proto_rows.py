"""Changing how many rows a DataProto has: padding to a divisor, folding one batch dimension into two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tensordict import TensorDict

from verl.utils.proto_merge import DataProtoError

if TYPE_CHECKING:
    from verl.protocol import DataProto


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows from the start, cyclically, until len is a multiple of `size_divisor`; returns (data, rows added)."""
    pad = -len(data) % size_divisor
    if pad == 0:
        return data, 0
    if len(data) == 0:
        raise DataProtoError("an empty batch cannot be padded: there is no row to repeat")
    return data.select_idxs(np.arange(len(data) + pad) % len(data)), pad


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows."""
    return data[: len(data) - pad_size] if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Two batch dimensions from one: tensors [B, ...] -> [new, B/new, ...], columns likewise."""
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise DataProtoError(f"{len(data)} rows cannot be folded into {new_batch_size}")
    inner = len(data) // new_batch_size
    tensors = {} if data.batch is None else dict(data.batch.items())
    folded = {k: v.reshape(new_batch_size, inner, *v.shape[1:]) for k, v in tensors.items()}
    columns = {k: v.reshape(new_batch_size, inner, *v.shape[1:]) for k, v in data.non_tensor_batch.items()}
    batch = None if data.batch is None else TensorDict(folded, batch_size=[new_batch_size])
    return type(data)(batch, columns, data.meta_info)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Inverse of `fold_batch_dim`: the first `batch_dims` dimensions become one."""
    tensors = {} if data.batch is None else dict(data.batch.items())
    flat = {k: v.flatten(0, batch_dims - 1) for k, v in tensors.items()}
    columns = {k: v.reshape(-1, *v.shape[batch_dims:]) for k, v in data.non_tensor_batch.items()}
    return type(data).from_dict(flat, columns, data.meta_info)
