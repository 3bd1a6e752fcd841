"""Reads the weights that a vLLM worker computes with, and compares them with those that it was sent.

vLLM fuses matrices (q, k and v; gate and up), splits them over tensor parallel ranks, and on a CPU multiplies by packed
copies that no Python object shows. Such a copy is read by multiplying unit vectors with it, which gives its columns bit
for bit, since all other products are zero.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from verl.rollout.weight_check import WeightCheck, difference_of, lora_scaling

COLUMNS_AT_ONCE = 128  # of a packed matrix that one check reads bit for bit; the others enter a sum
ADAPTER = 1  # id of the actor's adapter in vLLM
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
# Tensors that vLLM stores in another way than the files, by the model's class: transposed, or with reordered rows.
STORED_OTHERWISE = {"GPT2LMHeadModel": {"c_attn", "c_proj", "c_fc"}, "BloomForCausalLM": {"query_key_value"},
                    "Llama4ForCausalLM": {"q_proj", "k_proj"}}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Where the engine holds a part of a tensor of the model's files.

    `rows` and `columns` are the part's ranges in the file's tensor, `held_rows` its rows in the layer's. `slot` is the
    part's number among those of a fused layer. `packed`: the layer computes with a packed copy.
    """

    layer: nn.Module
    attribute: str  # weight, bias, ...
    rows: slice = field(default_factory=partial(slice, None))
    columns: slice = field(default_factory=partial(slice, None))
    held_rows: slice = field(default_factory=partial(slice, None))
    slot: int = 0
    packed: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a full tensor."""
        return tensor[self.rows, self.columns] if tensor.dim() == 2 else tensor[self.rows]


def parts_of(model: nn.Module) -> dict[str, list[Part]]:
    """The parts that this worker holds, by the tensors' names in the model's files.

    A tied output head is one more part of the embedding. Files may hold the tensors of a fused layer one by one or
    fused: both names are listed. Quantized layers, experts and layers of other kinds are left out, and tensors that
    vLLM stores in another way than the files.
    """
    parts: dict[str, list[Part]] = defaultdict(list)
    fused = FUSED | dict(getattr(model, "packed_modules_mapping", {}))
    layers = {name.replace(".base_layer", ""): layer for name, layer in model.named_modules()
              if not _wraps_another(layer)}  # fmt: skip
    embeddings = {id(layer.weight): name for name, layer in layers.items()
                  if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)}  # fmt: skip
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        if isinstance(layer, LinearBase):
            if not isinstance(layer.quant_method, UnquantizedLinearMethod):
                continue
            for stored in {tuple(fused.get(own, [own])), (own,)}:
                for slot, (rows, columns, held) in enumerate(_ranges(layer, len(stored))):
                    part = Part(layer, "weight", rows, columns, held, slot, packed=hasattr(layer, "cpu_linear"))
                    parts[f"{parent}.{stored[slot]}.weight"].append(part)
                    if getattr(layer, "bias", None) is not None:
                        bias = Part(layer, "bias", rows, held_rows=held, slot=slot)
                        parts[f"{parent}.{stored[slot]}.bias"].append(bias)
        elif isinstance(layer, VocabParallelEmbedding):
            if isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
                first, end = (getattr(layer.shard_indices, f"org_vocab_{which}_index") for which in ("start", "end"))
                part = Part(layer, "weight", slice(first, end), held_rows=slice(0, end - first))
                is_head = isinstance(layer, ParallelLMHead) or layer is getattr(model, "lm_head", None)
                source = embeddings.get(id(layer.weight), name)
                if source == name or not is_head:
                    parts[f"{source}.weight"].append(part)
                if is_head:
                    packed = hasattr(layer, "cpu_linear")
                    parts[f"{source}.weight"].append(replace(part, packed=packed))
        elif "Norm" in type(layer).__name__:
            for attribute, _ in layer.named_parameters(recurse=False):
                parts[f"{name}.{attribute}"].append(Part(layer, attribute))
    otherwise = STORED_OTHERWISE.get(type(model).__name__, set())
    return {name: held for name, held in parts.items() if name.split(".")[-2] not in otherwise}


def _wraps_another(layer: nn.Module) -> bool:
    """Whether a layer is vLLM's LoRA wrapper of another one."""
    return isinstance(getattr(layer, "base_layer", None), nn.Module)


def _ranges(layer: LinearBase, sources: int) -> Iterator[tuple[slice, slice, slice]]:
    """(rows, columns, held rows) of each of the tensors that a linear layer was made of; see Part."""
    rank, size = layer.tp_rank, layer.tp_size
    every = slice(None)
    if type(layer) is RowParallelLinear:  # subclasses may hold something else
        width = layer.input_size_per_partition
        yield every, slice(rank * width, (rank + 1) * width), every
    elif type(layer) is ReplicatedLinear or size == 1 == sources:
        yield every, every, every
    elif type(layer) is QKVParallelLinear and sources == 3:
        heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        widths = (layer.head_size, layer.head_size, layer.v_head_size)
        copies = (1, layer.num_kv_head_replicas, layer.num_kv_head_replicas)
        held = 0
        for count, width, shared in zip(heads, widths, copies, strict=True):
            rows = count * width
            first = rank // shared * rows
            yield slice(first, first + rows), every, slice(held, held + rows)
            held += rows
    elif type(layer) is MergedColumnParallelLinear and sources == len(layer.output_sizes):
        held = 0
        for width in layer.output_sizes:
            rows = width // size
            yield slice(rank * rows, (rank + 1) * rows), every, slice(held, held + rows)
            held += rows
    elif type(layer) is ColumnParallelLinear and sources == 1:
        rows = layer.output_size_per_partition
        yield slice(rank * rows, (rank + 1) * rows), every, every


def compare_weights(worker: Any, weights: Iterable[tuple[str, torch.Tensor]], number: int) -> WeightCheck:
    """Compare what a worker computes with with the full tensors that it was sent, by their names in the model's files.

    Of a packed matrix, COLUMNS_AT_ONCE columns are compared bit for bit, other ones with each `number`; the sum of all
    columns, each with a sign, is compared up to rounding. A layer of which only some tensors were sent is different.
    All of `weights` is read, also after a difference: gathering them is a collective call.
    """
    model, check = worker.model_runner.get_model(), WeightCheck()
    parts = parts_of(model)
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    rename = mapper.get_rename_mapper().map_name if mapper is not None else lambda name: name
    reader, sent = _Reader(number), set()
    for name, tensor in weights:
        held = parts.get(rename(name), [])
        sent.add(rename(name))
        if not held or any(part.of(tensor).shape != reader.shape_of(part) for part in held):
            check.unread.append(name)
            continue
        differences = (reader.compare(part, part.of(tensor)) for part in held)
        check.add(name, next((text for text in differences if text), None))
    slots: dict[tuple[int, str], set[str]] = defaultdict(set)  # the tensors of a fused layer
    for name, held in parts.items():
        for part in held:
            if part.held_rows != slice(None):
                slots[id(part.layer), part.attribute].add(name)
    for names in slots.values():
        if names & sent:
            for name in sorted(names - sent):
                check.add(name, "was not sent")
    return check


class _Reader:
    """Compares parts with what their layers compute with; keeps the reading of the last packed matrix."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.layer: nn.Module | None = None
        self.reading: torch.Tensor | None = None

    def compare(self, part: Part, expected: torch.Tensor) -> str | None:
        layer = part.layer
        if not part.packed:
            return difference_of(getattr(layer, part.attribute)[part.held_rows], expected)
        width = expected.shape[1]
        window = self._window(width)
        if self.layer is not layer:
            self.layer, self.reading = layer, self._read(layer, width)
        reading = self.reading[:, part.held_rows]  # [columns + 1, rows]
        expected = expected.to(reading.dtype)
        if difference := difference_of(reading[:-1].T, expected[:, window] + 0.0):  # -0 becomes 0 in a sum
            return f"as packed {difference}"
        signs = _signs(width, torch.float32)
        sums = expected.float() @ signs
        largest = torch.linalg.vector_norm(expected.float(), 1, dim=1)
        limit = torch.finfo(reading.dtype).eps * sums.abs() + 16 * torch.finfo(torch.float32).eps * largest
        wrong = ~((reading[-1].float() - sums).abs() <= limit)
        return f"as packed differs in {int(wrong.sum())} of {len(wrong)} rows" if wrong.any() else None

    @staticmethod
    def shape_of(part: Part) -> torch.Size:
        """The shape of what the layer holds; on a CPU vLLM empties a weight that it has packed."""
        layer, held = part.layer, getattr(part.layer, part.attribute)
        if not held.numel() and part.packed:
            sizes = (getattr(layer, f"{side}_size_per_partition", getattr(layer, f"{side}_size"))
                     for side in ("output", "input"))  # fmt: skip
            held = torch.empty(*sizes, device="meta")
        return held[part.held_rows].shape

    def _window(self, width: int) -> slice:
        first = self.number % math.ceil(width / COLUMNS_AT_ONCE) * COLUMNS_AT_ONCE
        return slice(first, min(width, first + COLUMNS_AT_ONCE))

    def _read(self, layer: nn.Module, width: int) -> torch.Tensor:
        """[columns + 1, rows of the layer]: columns of the packed matrix, and the sum of all with signs."""
        window = self._window(width)
        dtype = layer.weight.dtype
        inputs = torch.zeros(window.stop - window.start + 1, width, dtype=dtype)
        inputs[:-1, window].fill_diagonal_(1)
        inputs[-1] = _signs(width, dtype)
        return layer.cpu_linear(inputs, layer.weight, None)


def _signs(width: int, dtype: torch.dtype) -> torch.Tensor:
    """1 or -1 at random, the same each time, [width]."""
    generator = torch.Generator().manual_seed(width)
    return (2 * torch.randint(0, 2, (width,), generator=generator) - 1).to(dtype)


def compare_adapter(worker: Any, tensors: Iterable[tuple[str, torch.Tensor]], config: Any) -> WeightCheck:
    """Compare the LoRA adapter that a worker applies with the one that it was sent, under peft's names.

    vLLM multiplies B by the adapter's scaling and keeps both factors in a slot next to their layer. Layers for which
    nothing was sent must hold zeros there.
    """
    manager, check = worker.model_runner.lora_manager._adapter_manager, WeightCheck()
    if ADAPTER not in manager.lora_index_to_id:
        check.add("the adapter", "is not loaded")
        return check
    slot = manager.lora_index_to_id.index(ADAPTER)
    expected: dict[tuple[int, int], dict[str, tuple[str, torch.Tensor]]] = defaultdict(dict)
    parts = parts_of(worker.model_runner.get_model())
    wrappers = {id(layer.base_layer): layer for layer in manager.modules.values() if _wraps_another(layer)}
    for name, tensor in tensors:
        owner, _, factor = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        held = [part for part in parts.get(f"{owner}.weight", []) if id(part.layer) in wrappers]
        if not held or factor not in ("lora_A", "lora_B"):
            check.unread.append(name)
            continue
        for part in held:
            own = tensor[:, part.columns] if factor == "lora_A" else tensor[part.rows]
            expected[id(part.layer), part.slot][factor] = name, own
    for key, layer in wrappers.items():
        for number, (held_a, held_b) in enumerate(zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)):
            sent = expected.pop((key, number), {})
            if not sent:
                if held_b[slot].any():
                    check.add(f"{layer.prefix}, part {number},", "has an adapter that was not sent")
                continue
            (name_a, a), (name_b, b) = sent["lora_A"], sent["lora_B"]
            scaled = b.to(held_b.dtype) * lora_scaling(config, len(a))
            check.add(name_a, _difference_in_slot(held_a[slot, 0], a))
            check.add(name_b, _difference_in_slot(held_b[slot, 0], scaled))
    return check


def _difference_in_slot(held: torch.Tensor, expected: torch.Tensor) -> str | None:
    """As `difference_of`; `held` may be larger than what it holds, and must be zero beyond it."""
    rows, columns = expected.shape
    difference = difference_of(held[:rows, :columns], expected)
    if difference is None and (held[rows:].any() or held[:, columns:].any()):
        return "holds entries beyond those that were sent"
    return difference
