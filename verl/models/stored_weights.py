"""Fills a sharded model from safetensors files: a node reads each tensor once, and its ranks keep their parts of it.
Writes the files of a Hugging Face folder, one tensor in memory at a time.

The model is built with parameters that take no memory (`is_placeholder`); sharding gives each rank memory for its part.
"""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from loguru import logger
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from verl.utils.weight_files import (
    FILE_DTYPES,
    StoredTensor,
    WeightFileError,
    safetensors_of,
    stored_tensors,
    write_safetensors,
)

BLOCK_BYTES = 16 << 20  # of a tensor, read and sent at a time
MAPPED_BYTES = 32 << 20  # read through one mapping of a file, whose pages count as this process's memory


def hf_name(name: str) -> str:
    """A parameter's name without peft's wrappers."""
    return name.replace("base_model.model.", "").replace(".base_layer", "").replace(".original_module", "")


def write_weights(
    folder: Path, described: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor], max_shard_size: int | str
) -> None:
    """Writes what `read(name)` gives into files of `max_shard_size` bytes or units such as "5GB", with an index if
    there are several. `read` is called in the order of `described`, if no tensor exceeds `max_shard_size`.

    `described`: name -> a tensor (of the meta device) with the shape and dtype that `read` will give.
    """
    split = split_torch_state_dict_into_shards(dict(described), max_shard_size=max_shard_size)
    for file, names in split.filename_to_tensors.items():
        write_safetensors(folder / file, {name: described[name] for name in names}, read)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


@dataclass
class _Source:
    """Where a parameter is stored; a converter makes it of several tensors, each with the pattern of its name."""

    converter: WeightConverter | None
    tensors: list[tuple[StoredTensor, str | None]] = field(default_factory=list)


class StoredWeights:
    """The tensors in a model folder, by the parameter of `meta` that they belong to.

    `meta` is the model on the meta device. `create` gives None for folders that need more than reading and fusing:
    no safetensors, quantized weights, tensors that are split on loading, stored buffers, tied weights stored twice.
    """

    def __init__(self, meta: PreTrainedModel, sources: dict[str, _Source]):
        self.meta = meta
        self.sources = sources
        self._opened: tuple[Path, Any] | None = None
        self._mapped = 0

    @classmethod
    def create(cls, meta: PreTrainedModel, folder: str | Path) -> StoredWeights | None:
        files = safetensors_of(folder)
        if not files or meta.config.to_dict().get("quantization_config"):
            return None
        tensors, names = stored_tensors(files), meta.state_dict()
        mapping = get_model_conversion_mapping(meta)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        sources: dict[str, _Source] = {}
        unknown = []
        for key in sorted(tensors, key=dot_natural_key):  # a converter joins tensors in this order
            own = rename_source_key(key, [], [], meta.base_model_prefix, names)
            name, pattern = rename_source_key(key, renamings, converters, meta.base_model_prefix, names)
            if name not in names:
                name, pattern = own
            if name not in names:
                unknown.append(key)
                continue
            converter = by_pattern.get(pattern)
            sources.setdefault(name, _Source(converter)).tensors.append((tensors[key], pattern))
        split = any(s.converter is not None and len(s.converter.target_patterns) > 1 for s in sources.values())
        buffers = {name for name, _ in meta.named_buffers()}
        if split or buffers & sources.keys() or meta.all_tied_weights_keys.keys() & sources.keys():
            return None
        if any(tensor.dtype not in FILE_DTYPES for s in sources.values() for tensor, _ in s.tensors):
            return None
        for name, source in sources.items():
            shape, stored = tuple(names[name].shape), source.tensors[0][0]
            if source.converter is None and stored.shape != shape:
                text = f"{stored.file}: {stored.name} is {stored.shape}, but the model's is {shape}"
                raise WeightFileError(f"{text}. Correct config.json, hf_config_path or override_config.")
        if unknown:
            logger.debug("{} holds {} tensors that the model has no use for: {}", folder, len(unknown), unknown[:5])
        return cls(meta, sources)

    def placeholders(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """A state dict of CPU tensors in the memory of one number each, for what is stored.

        The model initializes its other parameters.
        """
        shapes = {name: tensor.shape for name, tensor in self.meta.state_dict().items()}
        return {name: torch.zeros((), dtype=dtype).expand(shapes[name]) for name in self.sources}

    @torch.no_grad()
    def fill(self, module: nn.Module, device: torch.device) -> None:
        """Write the stored weights into `module`, which is `meta` sharded, with or without adapters. Collective."""
        ranks, group = _ranks_of_this_node()
        reads = dist.get_rank() == ranks[0]
        for name, parameter in module.named_parameters():
            source = self.sources.get(re.sub(r"\.modules_to_save\.[^.]+", "", hf_name(name)))
            if source is None:
                continue
            local, offset = parameter, (0,) * parameter.dim()
            if isinstance(parameter, DTensor):
                local = parameter.to_local()
                _, offset = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
            stored, made = source.tensors[0][0], None
            dtype = getattr(torch, FILE_DTYPES[stored.dtype])
            if source.converter is not None:
                dtype = parameter.dtype
                made = self._converted(source, hf_name(name)) if reads else None
            length, *row_shape = tuple(parameter.shape) or (1,)
            rows = max(1, BLOCK_BYTES // max(1, math.prod(row_shape) * dtype.itemsize))
            for first in range(0, length, rows):
                shape = (min(rows, length - first), *row_shape)
                if reads:
                    block = self._read(stored, first, rows) if made is None else made[first : first + rows]
                    block = block.to(device=device, dtype=dtype).contiguous().view(shape)
                else:
                    block = torch.empty(shape, dtype=dtype, device=device)
                if len(ranks) > 1:
                    dist.broadcast(block, src=ranks[0], group=group)
                _copy_overlap(local, offset, block, first)
        self._opened = None
        if group is not None:
            dist.destroy_process_group(group)  # NCCL would keep its buffers

    def _read(self, stored: StoredTensor, first: int = 0, rows: int | None = None) -> torch.Tensor:
        """Rows of a stored tensor; all by default."""
        if self._opened is None or self._opened[0] != stored.file or self._mapped > MAPPED_BYTES:
            self._opened, self._mapped = (stored.file, safe_open(stored.file, "pt")), 0
        part = self._opened[1].get_slice(stored.name)
        read = part[first : None if rows is None else first + rows] if stored.shape else part[...]
        self._mapped += read.nbytes
        return read

    def _converted(self, source: _Source, name: str) -> torch.Tensor:
        converter = deepcopy(source.converter)
        for stored, pattern in source.tensors:
            converter.add_tensor(name, stored.name, pattern, self._read(stored))
        made = converter.convert(name, model=self.meta, config=self.meta.config)[name]
        return made[0] if isinstance(made, list) else made


def _copy_overlap(local: torch.Tensor, offset: tuple[int, ...], block: torch.Tensor, first: int) -> None:
    """Copy what `block`, rows from `first` on of a tensor, shares with `local`, its part at `offset`."""
    if local.dim() == 0:
        local.copy_(block[0])
        return
    start, end = max(offset[0], first), min(offset[0] + len(local), first + len(block))
    if start < end:
        rows = block[start - first : end - first]
        for dim in range(1, local.dim()):
            rows = rows.narrow(dim, offset[dim], local.shape[dim])
        local[start - offset[0] : end - offset[0]].copy_(rows)


def _ranks_of_this_node() -> tuple[list[int], dist.ProcessGroup | None]:
    """The ranks on this machine, the first of which reads, and their group (None: the default one)."""
    nodes: list[Any] = [None] * dist.get_world_size()
    file = Path("/proc/sys/kernel/random/boot_id")
    dist.all_gather_object(nodes, f"{platform.node()} {file.read_text().strip() if file.is_file() else ''}")
    members = [[rank for rank, of in enumerate(nodes) if of == node] for node in dict.fromkeys(nodes)]
    own = next(ranks for ranks in members if dist.get_rank() in ranks)
    return own, dist.new_subgroups_by_enumeration(members)[0] if len(members) > 1 else None
