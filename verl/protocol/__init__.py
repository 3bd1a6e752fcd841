"""DataProto: the batch that travels between the trainer and its workers."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from loguru import logger
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl.protocol.merge import (
    DataProtoConfig,
    DataProtoError,
    check_same_keys,
    chunk_tensordict,
    concat_tensordict,
    deep_equal,
    fold_batch_dim,
    index_select_tensor_dict,
    iterate_batches,
    list_of_dict_to_dict_of_list,
    merge_meta,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)
from verl.protocol.serialization import (
    deserialize_single_tensor,
    deserialize_tensordict,
    load_parts,
    object_array,
    save_parts,
    serialize_single_tensor,
    serialize_tensordict,
)

if TYPE_CHECKING:
    import ray

__all__ = [
    "DataProto", "DataProtoConfig", "DataProtoError", "DataProtoFuture", "DataProtoItem", "all_gather_data_proto",
    "collate_fn", "deserialize_single_tensor", "deserialize_tensordict", "fold_batch_dim",
    "list_of_dict_to_dict_of_list", "pad_dataproto_to_divisor", "serialize_single_tensor", "serialize_tensordict",
    "unfold_batch_dim", "union_numpy_dict", "union_tensor_dict", "unpad_dataproto",
]  # fmt: skip


@dataclass
class DataProtoItem:
    """One row: tensors without the batch dimension, one value for each non-tensor column."""

    batch: TensorDict | None = None
    non_tensor_batch: dict = field(default_factory=dict)
    meta_info: dict = field(default_factory=dict)


@dataclass
class DataProto:
    """A batch of rows: tensors in `batch`, numpy columns in `non_tensor_batch`, facts about the batch in `meta_info`.

    Invariant: every tensor and every column has the same first dimension, len(self). `uid` marks the samples of one
    prompt. A batch that came through Ray shares the object store's memory: read it, or clone a tensor before writing
    into it in place.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
        self.check_consistency()

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return len(next(iter(self.non_tensor_batch.values()))) if self.non_tensor_batch else 0

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.batch is None else dict(self.batch.items())

    def __getitem__(self, item: Any) -> DataProtoItem | DataProto:
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list | np.ndarray) or (isinstance(item, torch.Tensor) and item.ndim):
            return self.select_idxs(item)
        if isinstance(item, int | np.integer | torch.Tensor):
            row = int(item)
            if not -len(self) <= row < len(self):
                raise IndexError(f"row {row} of a DataProto with {len(self)} rows")
            tensors = None if self.batch is None else self.batch[row]
            return DataProtoItem(tensors, {k: v[row] for k, v in self.non_tensor_batch.items()}, self.meta_info)
        raise TypeError(f"a DataProto is indexed by int, slice, list, array or tensor, not {type(item).__name__}")

    def __getstate__(self) -> dict[str, Any]:
        batch = None if self.batch is None else serialize_tensordict(self.batch)
        columns = {k: np.ascontiguousarray(v) for k, v in self.non_tensor_batch.items()}
        return {"batch": batch, "non_tensor_batch": columns, "meta_info": self.meta_info}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.batch = None if state["batch"] is None else deserialize_tensordict(state["batch"])
        self.non_tensor_batch = state["non_tensor_batch"]
        self.meta_info = state["meta_info"]

    def save_to_disk(self, filepath: str | os.PathLike) -> None:
        """Write one safetensors file (non-tensor part as JSON inside it); values JSON cannot hold are a TypeError."""
        save_parts(filepath, self.batch, self.non_tensor_batch, self.meta_info)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike) -> DataProto:
        """Read what `save_to_disk` wrote; no pickle is involved."""
        return DataProto(*load_parts(filepath))

    def print_size(self, prefix: str = "") -> None:
        """Log how many GiB the tensors and the numpy columns take (object columns count their pointers only)."""
        tensors = sum(v.nbytes for v in self._tensors().values())
        columns = sum(v.nbytes for v in self.non_tensor_batch.values())
        logger.info(f"{prefix} tensors {tensors / 2**30:.4f} GiB, numpy columns {columns / 2**30:.4f} GiB".strip())

    def check_consistency(self) -> None:
        """DataProtoError unless every column has len(self) rows; a TensorDict checks its tensors itself."""
        if self.batch is not None and len(self.batch.batch_size) < 1:
            raise DataProtoError("batch has no batch dimension; build it with batch_size=[rows]")
        if self.batch is not None and self.non_tensor_batch and len(self.batch.batch_size) != 1:
            raise DataProtoError(f"non_tensor_batch needs one batch dimension, not {tuple(self.batch.batch_size)}")
        rows = len(self)
        for key, column in self.non_tensor_batch.items():
            if not isinstance(column, np.ndarray):
                kind = type(column).__name__
                raise DataProtoError(f"non_tensor_batch[{key!r}] is a {kind}; make it a numpy array (dtype=object)")
            if column.ndim == 0 or column.shape[0] != rows:
                raise DataProtoError(f"non_tensor_batch[{key!r}] has shape {column.shape}; expected {rows} rows")

    @classmethod
    def from_single_dict(
        cls, data: dict[str, torch.Tensor | np.ndarray], meta_info: dict | None = None, auto_padding: bool = False
    ) -> DataProto:
        """Tensors [B, ...] become `batch`, numpy arrays `non_tensor_batch`; `auto_padding`: see is_padding_enabled."""
        for key, value in data.items():
            if not isinstance(value, torch.Tensor | np.ndarray):
                raise DataProtoError(f"column {key!r} is a {type(value).__name__}; give a tensor or a numpy array")
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        non_tensors = {key: value for key, value in data.items() if key not in tensors}
        return cls.from_dict(tensors, non_tensors, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls, tensors: dict[str, torch.Tensor] | None = None, non_tensors: dict[str, Any] | None = None,
        meta_info: dict | None = None, num_batch_dims: int = 1, auto_padding: bool = False,
    ) -> DataProto:
        """From columns [B, ...] whose first `num_batch_dims` dimensions agree; a list becomes an object array [B]."""
        if num_batch_dims < 1:
            raise DataProtoError(f"num_batch_dims={num_batch_dims} must be at least 1")
        tensors, non_tensors = tensors or {}, non_tensors or {}
        first = next(iter(tensors), None)
        size = () if first is None else tensors[first].shape[:num_batch_dims]
        for key, tensor in tensors.items():
            if tensor.ndim < num_batch_dims or tensor.shape[:num_batch_dims] != size:
                raise DataProtoError(
                    f"tensor {key!r} has shape {tuple(tensor.shape)}, but {first!r} has {tuple(tensors[first].shape)}; "
                    f"the first {num_batch_dims} dimension(s) must agree"
                )
        columns = {k: v if isinstance(v, np.ndarray) else object_array(v) for k, v in non_tensors.items()}
        meta_info = dict(meta_info or {})
        if auto_padding:
            meta_info[DataProtoConfig.auto_padding_key] = True
        return cls(TensorDict(tensors, batch_size=size) if tensors else None, columns, meta_info)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict | None = None, meta_info: dict | None = None, num_batch_dims: int = 1
    ) -> DataProto:
        """Inverse of `to_tensordict`: non-tensor stacks become columns [B], single values go to `meta_info`."""
        if tensor_dict is None:
            raise DataProtoError("from_tensordict needs a TensorDict, got None")
        tensors, columns, meta = {}, {}, {}
        for key in tensor_dict.keys():
            value = tensor_dict.get(key)
            if isinstance(value, NonTensorStack):
                columns[key] = object_array([item.data for item in value.tensordicts])
            elif isinstance(value, NonTensorData):
                meta[key] = value.data
            else:
                tensors[key] = value
        size = tensor_dict.batch_size[:num_batch_dims]
        return cls(TensorDict(tensors, batch_size=size) if tensors else None, columns, {**meta, **(meta_info or {})})

    def to_tensordict(self) -> TensorDict:
        """Everything in one TensorDict: columns as NonTensorStack, meta_info values as NonTensorData."""
        rows = len(self)
        merged = TensorDict(self._tensors(), batch_size=[rows])
        for key, column in self.non_tensor_batch.items():
            merged.set(key, NonTensorStack(*[NonTensorData(value) for value in column]))
        for key, value in self.meta_info.items():
            if key in merged.keys():
                raise DataProtoError(f"meta_info[{key!r}] has the name of a column; rename one of them")
            merged.set(key, NonTensorData(value, batch_size=[rows]))
        return merged

    def to(self, device: torch.device | str | int) -> DataProto:
        """Move the tensors, in place."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def select(
        self, batch_keys: list[str] | None = None, non_tensor_batch_keys: list[str] | None = None,
        meta_info_keys: list[str] | None = None, deepcopy: bool = False,
    ) -> DataProto:
        """A DataProto with the named columns (None: all); shares memory unless `deepcopy`."""
        batch, tensors = self.batch, _pick(self._tensors(), batch_keys, "batch")
        if batch is not None:
            batch = TensorDict(tensors, batch_size=batch.batch_size, device=batch.device)
        columns = _pick(self.non_tensor_batch, non_tensor_batch_keys, "non_tensor_batch")
        meta = _pick(self.meta_info, meta_info_keys, "meta_info")
        if deepcopy:
            batch = None if batch is None else batch.clone()
            columns, meta = copy.deepcopy(columns), copy.deepcopy(meta)
        return DataProto(batch, columns, meta)

    def select_idxs(self, idxs: list | np.ndarray | torch.Tensor) -> DataProto:
        """Rows by number or by boolean mask [B], as a copy."""
        rows = idxs if isinstance(idxs, torch.Tensor) else torch.as_tensor(np.asarray(idxs))
        rows = rows.long() if rows.numel() == 0 and rows.dtype != torch.bool else rows  # numpy's empty list is float
        if rows.ndim != 1 or rows.is_floating_point():
            raise DataProtoError(f"rows are chosen by a 1-D list of ints or bools, not {rows.dtype} {[*rows.shape]}")
        if rows.dtype == torch.bool:
            if len(rows) != len(self):
                raise DataProtoError(f"a mask of {len(rows)} entries cannot choose among {len(self)} rows")
            rows = rows.nonzero().squeeze(-1)
        batch = None if self.batch is None else index_select_tensor_dict(self.batch, rows)
        picked = rows.cpu().numpy()
        return DataProto(batch, {k: v[picked] for k, v in self.non_tensor_batch.items()}, self.meta_info)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows start:end:step, sharing memory."""
        cut = slice(start, end, step)
        batch = None if self.batch is None else self.batch[cut]
        return DataProto(batch, {k: v[cut] for k, v in self.non_tensor_batch.items()}, self.meta_info)

    def pop(
        self, batch_keys: list[str] | None = None, non_tensor_batch_keys: list[str] | None = None,
        meta_info_keys: list[str] | None = None,
    ) -> DataProto:
        """Take the named columns out of self (None: none) and return them as a DataProto."""
        taken = self.select(batch_keys or [], non_tensor_batch_keys or [], meta_info_keys or [])
        for key in batch_keys or []:
            self.batch.pop(key)
        for key in non_tensor_batch_keys or []:
            self.non_tensor_batch.pop(key)
        for key in meta_info_keys or []:
            self.meta_info.pop(key)
        return taken

    def rename(self, old_keys: str | list[str] | None = None, new_keys: str | list[str] | None = None) -> DataProto:
        """Rename tensors, in place."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys or [])
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys or [])
        if len(old) != len(new):
            raise DataProtoError(f"rename got {len(old)} old and {len(new)} new names: {old} -> {new}")
        tensors = self._tensors()
        names = dict(zip(_pick(tensors, old, "batch"), new, strict=True))
        renamed = {names.get(k, k): v for k, v in tensors.items()}
        if len(renamed) != len(tensors):
            raise DataProtoError(f"rename {names} would give two tensors one name")
        if names:
            self.batch = TensorDict(renamed, batch_size=self.batch.batch_size, device=self.batch.device)
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add other's columns and meta_info to self, in place; what both have must be equal, else DataProtoError."""
        has_rows = [d.batch is not None or bool(d.non_tensor_batch) for d in (self, other)]
        if len(self) != len(other) and all(has_rows):
            raise DataProtoError(f"union of {len(self)} and {len(other)} rows; both sides need the same rows")
        batch = self.batch
        if other.batch is not None:
            batch = (batch if batch is not None else other.batch).clone(recurse=False)
            batch = union_tensor_dict(batch, other.batch)
        columns = union_numpy_dict(dict(self.non_tensor_batch), other.non_tensor_batch)
        for key, value in other.meta_info.items():
            if key in self.meta_info and not deep_equal(self.meta_info[key], value):
                raise DataProtoError(f"union: meta_info[{key!r}] is {self.meta_info[key]!r} here, {value!r} there")
        self.batch, self.non_tensor_batch = batch, columns
        self.meta_info.update(other.meta_info)
        return self

    def make_iterator(
        self, mini_batch_size: int, epochs: int, seed: int | None = None, dataloader_kwargs: dict | None = None
    ) -> Iterator[DataProto]:
        """Mini-batches of `mini_batch_size` rows, `epochs` times; dataloader_kwargs takes shuffle, drop_last, ..."""
        return iterate_batches(len(self), self.select_idxs, mini_batch_size, epochs, seed, dataloader_kwargs)

    def is_padding_enabled(self) -> bool:
        """Whether dispatch pads this batch to a multiple of its parts, by VERL_AUTO_PADDING or its meta_info."""
        return bool(self.meta_info.get(DataProtoConfig.auto_padding_key)) or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append, in place, `padding_size` copies of the last row, or with padding_candidate="first" of the first."""
        if padding_size == 0:
            return
        row = 0 if padding_candidate == "first" else len(self) - 1
        padded = self.select_idxs(list(range(len(self))) + [row] * padding_size)
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    def chunk(self, chunks: int) -> list[DataProto]:
        """Equal consecutive parts, sharing memory; where is_padding_enabled(), sizes may differ by one."""
        if chunks < 1:
            raise DataProtoError(f"chunk({chunks}): the number of parts must be at least 1")
        if len(self) % chunks != 0 and not self.is_padding_enabled():
            raise DataProtoError(
                f"{len(self)} rows cannot be cut into {chunks} equal parts; make the batch a multiple of {chunks}, "
                f"or pad it with pad_dataproto_to_divisor"
            )
        return [self.slice(len(self) * i // chunks, len(self) * (i + 1) // chunks) for i in range(chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Consecutive parts of `split_size` rows, the last one perhaps shorter; shares memory."""
        if split_size < 1:
            raise DataProtoError(f"split({split_size}): the part size must be at least 1")
        return [self.slice(a, a + split_size) for a in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: list[DataProto]) -> DataProto:
        """Rows of all parts in order. meta_info must agree; its `metrics` are gathered into a dict of lists."""
        if not data:
            raise DataProtoError("concat of an empty list of DataProto")
        batches = [part.batch for part in data if part.batch is not None]
        if batches and len(batches) < len(data):
            number = next(i for i, part in enumerate(data) if part.batch is None)
            raise DataProtoError(f"concat: part {number} has no tensors, others have; give all parts the same columns")
        columns = [part.non_tensor_batch for part in data]
        check_same_keys(columns)
        joined = {key: np.concatenate([part[key] for part in columns]) for key in columns[0]}
        meta = merge_meta([part.meta_info for part in data])
        return DataProto(concat_tensordict(batches) if batches else None, joined, meta)

    def reorder(self, indices: torch.Tensor | list | np.ndarray) -> None:
        """Put the rows in the order of `indices` [B], in place."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Each row `repeat_times` times: a a b b when `interleave`, else a b a b."""
        rows = np.arange(len(self))
        return self.select_idxs(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def unfold_column_chunks(self, n_split: int, split_keys: list[str] | None = None) -> DataProto:
        """Cut dimension 1 of `split_keys` in `n_split` and make the parts rows: [B, S, ...] -> [B*n, S/n, ...].

        Of a column [B] of lists each list is cut. All other columns are repeated (interleaved) to match.
        """
        chosen = _pick({**self._tensors(), **self.non_tensor_batch}, split_keys or [], "the batch")
        wide = self.repeat(n_split, interleave=True)
        for key, v in chosen.items():
            of_lists = isinstance(v, np.ndarray) and v.ndim == 1 and all(isinstance(x, list) for x in v)
            if of_lists and all(len(x) % n_split == 0 for x in v):
                parts = [x[i * len(x) // n_split : (i + 1) * len(x) // n_split] for x in v for i in range(n_split)]
                wide.non_tensor_batch[key] = object_array(parts)
                continue
            if v.ndim < 2 or v.shape[1] % n_split:
                raise DataProtoError(f"column {key!r} of shape {tuple(v.shape)} cannot be cut in {n_split} along dim 1")
            part = wide.batch if isinstance(v, torch.Tensor) else wide.non_tensor_batch
            part[key] = v.reshape(v.shape[0] * n_split, v.shape[1] // n_split, *v.shape[2:])
        return wide

    def sample_level_repeat(self, repeat_times: torch.Tensor | np.ndarray | list) -> DataProto:
        """Row i repeated repeat_times[i] times, in place of the row; repeat_times has len(self) entries."""
        times = np.asarray(repeat_times)
        if times.shape != (len(self),):
            raise DataProtoError(f"repeat_times has shape {times.shape}; expected one count per row, {len(self)}")
        return self.select_idxs(np.repeat(np.arange(len(self)), times))

    def get_data_info(self) -> str:
        """A few lines that say what is inside: keys, shapes, types."""
        tensors = self._tensors().items()
        lines = ["batch", *(f"  {key}: {tuple(v.shape)} {v.dtype} {v.device}" for key, v in tensors)]
        lines += ["non_tensor_batch", *(f"  {key}: {v.shape} {v.dtype}" for key, v in self.non_tensor_batch.items())]
        lines += ["meta_info", *(f"  {key}: {type(v).__name__}" for key, v in self.meta_info.items())]
        return "\n".join(lines)


def _pick(part: dict, keys: list[str] | None, name: str) -> dict:
    for key in keys or []:
        if key not in part:
            raise KeyError(f"{key!r} is not in {name}; it has {sorted(map(str, part))}")
    return dict(part) if keys is None else {k: part[k] for k in keys}


def collate_fn(x: list[DataProtoItem]) -> DataProto:
    """Rows -> a batch, with the first row's meta_info."""
    if not x:
        raise DataProtoError("collate_fn got no rows")
    batch = None if x[0].batch is None else torch.stack([item.batch for item in x]).contiguous()
    rows = list_of_dict_to_dict_of_list([item.non_tensor_batch for item in x])
    return DataProto(batch, {k: object_array(v) for k, v in rows.items()}, x[0].meta_info)


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """Replace `data`, in place on every rank, by the rows of all ranks of the group in rank order."""
    parts: list[Any] = [None] * torch.distributed.get_world_size(process_group)
    torch.distributed.all_gather_object(parts, DataProto(data.batch, data.non_tensor_batch), process_group)
    rows = DataProto.concat(parts)
    data.batch, data.non_tensor_batch = rows.batch, rows.non_tensor_batch


def concat_batches(parts: list) -> DataProto | TensorDict | DataProtoFuture:
    """Rows of all parts in order, [B_i, ...] -> [sum B_i, ...]; of references a future; TypeError for other parts."""
    kinds = {type(part) for part in parts}
    if parts and all(isinstance(part, DataProto) for part in parts):
        return DataProto.concat(parts)
    if len(kinds) < 2 and all(isinstance(part, TensorDict) for part in parts):
        return concat_tensordict(parts)
    import ray

    if all(isinstance(part, ray.ObjectRef) for part in parts):
        return DataProtoFuture.concat(parts)
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    if all(isinstance(part, DataProto | TensorDict) for part in parts):
        raise TypeError(f"the ranks returned batches of several types: {names}")
    raise TypeError(f"a method that gets a batch must return a DataProto or a TensorDict on every rank, got {names}")


@dataclass
class DataProtoFuture:
    """The output of a non-blocking call: references that become a DataProto or TensorDict on `get`.

    `collect_fn` joins what the ranks returned; `dispatch_fn`, when set, takes one rank's part of that. A future that is
    passed to another dispatched call sends references only: each rank gets the outputs and cuts out its part.
    """

    collect_fn: Callable[[list], DataProto | TensorDict]
    futures: list[ray.ObjectRef]
    dispatch_fn: Callable[[DataProto | TensorDict], DataProto | TensorDict] | None = None

    @staticmethod
    def concat(data: list[ray.ObjectRef]) -> DataProtoFuture:
        """The future of these outputs' rows, in order."""
        return DataProtoFuture(collect_fn=concat_batches, futures=data)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Futures of `chunks` equal parts; only `get` fetches and cuts."""
        cuts = [functools.partial(_chunk_of, chunks=chunks, index=i) for i in range(chunks)]
        return [DataProtoFuture(self.collect_fn, self.futures, cut) for cut in cuts]

    def get(self) -> DataProto | TensorDict:
        """Wait for the outputs and join them. TypeError if one is no batch."""
        import ray

        parts = ray.get(self.futures)
        for part in parts:
            if not isinstance(part, DataProto | TensorDict):
                raise TypeError(f"a worker returned a {type(part).__name__}, neither a DataProto nor a TensorDict")
        joined = self.collect_fn(parts)
        return joined if self.dispatch_fn is None else self.dispatch_fn(joined)


def _chunk_of(data: DataProto | TensorDict, chunks: int, index: int) -> DataProto | TensorDict:
    return (chunk_tensordict(data, chunks) if isinstance(data, TensorDict) else data.chunk(chunks))[index]
