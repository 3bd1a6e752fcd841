"""A key/value cache whose rows have different lengths and are rolled back by overwriting."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin

READ_TOKENS = 1024  # of a forward that reads prompts of unequal length on a CPU; smaller forwards are slower per token

KeysValues = tuple[torch.Tensor, torch.Tensor]
"""A layer's keys and values [B, heads, slots, head_dim]."""


@dataclass
class WritePositions:
    """Slots that the next forward writes, usually the positions of its tokens; shared by the layers of a cache.

    Layers refer to this object instead of their cache: a reference cycle would keep the keys and values of finished
    batches in memory until Python's garbage collection.
    """

    rows: int
    slots: int
    span: int = 0
    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))
    row_index: torch.Tensor = field(default_factory=lambda: torch.empty(0, 1, dtype=torch.long))


class RowLayer(CacheLayerMixin):
    """One layer's keys and values, [rows, heads, slots, head_dim]."""

    is_compileable = False
    is_croppable = True

    def __init__(self, positions: WritePositions):
        super().__init__()
        self._writes = positions

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate all rows and slots like `key_states` and `value_states` [B, heads, q, head_dim]."""
        rows, slots = self._writes.rows, self._writes.slots
        # Zeros, not uninitialised memory: a masked NaN would still make the attention's weighted sum NaN.
        self.keys = key_states.new_zeros(rows, key_states.shape[1], slots, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], slots, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write [B, heads, q, head_dim] to the announced slots; return views [B, heads, span, head_dim]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, span = self._writes.positions.shape[0], self._writes.span
        self.keys[self._writes.row_index, :, self._writes.positions] = key_states.transpose(1, 2)
        self.values[self._writes.row_index, :, self._writes.positions] = value_states.transpose(1, 2)
        return self.keys[:batch, :, :span], self.values[:batch, :, :span]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._writes.span, 0

    def get_seq_length(self) -> int:
        return self._writes.span

    def get_max_length(self) -> int:
        return self._writes.slots


class RowCache(Cache):
    """Preallocated cache of `rows` rows with `slots` slots each, for any HF model with full attention in every layer.

    A forward writes each token to the slot that `announce` names, usually the token's position, and the mask hides
    every slot after it. So a rejected draft token is rolled back by feeding the next tokens at its position.
    """

    def __init__(self, rows: int, slots: int, layers: int):
        self.writes = WritePositions(rows, slots)
        super().__init__(layers=[RowLayer(self.writes) for _ in range(layers)])

    def repeat_interleave(self, n: int) -> None:
        """Each row n times over, adjacent."""
        self.writes.rows *= n
        for layer in self.layers:
            if n > 1 and layer.is_initialized:
                layer.keys, layer.values = (states.repeat_interleave(n, 0) for states in (layer.keys, layer.values))

    def read(self, model: nn.Module, ids: torch.Tensor, lengths: Sequence[int] | None = None) -> None:
        """Fill the first slots by forwards of the model over right-padded ids, int64 [rows, width].

        What all rows begin with is read once. With the tokens of each row, `lengths`, the rest is read column block by
        column block, each without the rows after the last one that reaches it: the longest should come first.
        """
        rows, width = ids.shape
        shared = int((ids == ids[0]).all(0).long().cumprod(0).sum()) if rows > 1 else 0
        if shared:
            self._read_columns(model, ids[:1], 0, shared)
            for states in (s for layer in self.layers if layer.is_initialized for s in (layer.keys, layer.values)):
                states[1:, :, :shared] = states[:1, :, :shared]
        lengths = lengths or [width] * rows
        step = width if ids.is_cuda or min(lengths) == width else max(1, READ_TOKENS // rows)
        for start in range(shared, max(lengths), step):
            reached = max(row for row, length in enumerate(lengths) if length > start) + 1
            self._read_columns(model, ids[:reached], start, min(start + step, width))

    def _read_columns(self, model: nn.Module, ids: torch.Tensor, start: int, end: int) -> None:
        positions = torch.arange(start, end, device=ids.device).expand(len(ids), -1)
        mask = self.announce(positions, model.dtype)
        model(input_ids=ids[:, start:end], position_ids=positions, attention_mask=mask, past_key_values=self,
              use_cache=True, logits_to_keep=last_columns(ids, 0))  # fmt: skip

    def copied(self, slots: int) -> list[KeysValues]:
        """Copies of the keys and values of each layer in the first `slots` slots."""
        return [(layer.keys[:, :, :slots].clone(), layer.values[:, :, :slots].clone()) for layer in self.layers]

    def restore(self, states: Iterable[KeysValues]) -> None:
        """Start all rows of a new cache with what `copied` returned."""
        for layer, (keys, values) in zip(self.layers, states, strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys[:, :, : keys.shape[2]], layer.values[:, :, : values.shape[2]] = keys, values

    def announce(
        self, positions: torch.Tensor, dtype: torch.dtype, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Choose the slots, int64 [B, q], that the next forward writes in rows 0..B-1; returns its additive attention
        mask [B, 1, q, span] of `dtype`, where span is the largest slot plus one.

        A token sees the slots up to its own (mask 0) and no later one (mask: the dtype's minimum); `visible`, bool
        [B, q, span], replaces this. Raises ValueError for a slot beyond the reserved ones.
        """
        target = self.writes
        target.positions = positions
        target.row_index = torch.arange(positions.shape[0], device=positions.device)[:, None]
        target.span = int(positions.max()) + 1
        if target.span > target.slots:
            raise ValueError(
                f"slot {target.span - 1} lies outside a cache of {target.slots} slots; reserve more slots"
            )
        if visible is None:
            hidden = torch.arange(target.span, device=positions.device) > positions[:, None, :, None]
        else:
            hidden = ~visible[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
        return mask.masked_fill_(hidden, torch.finfo(dtype).min)


def last_columns(ids: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` columns of ids [B, q] as a model's `logits_to_keep`, int64 [count].

    A number there makes the states a view of unequal strides, for which torch, on a CPU, copies the weights of a frozen
    output layer once for each row.
    """
    return torch.arange(ids.shape[1] - count, ids.shape[1], device=ids.device)


@dataclass
class Prefills:
    """Keys and values of the last batch of prompts, which later decodings of the same prompts copy.

    Holds as much memory as one cache of these prompts for each model, until other prompts are decoded. The weights must
    not change between the calls.
    """

    prompts: torch.Tensor | None = None  # [B, width] ids, right-padded
    kept: dict[nn.Module, tuple[list[KeysValues], float]] = field(default_factory=dict)  # with the seconds they took

    def fill(
        self, model: nn.Module, prompts: torch.Tensor, cache: RowCache, lengths: Sequence[int] | None = None
    ) -> float:
        """Fill `cache` with a model's states over `prompts` of these lengths, by reading them if they are not kept.

        Returns the seconds that an earlier call spent on reading them, which a decoding that is compared with others
        must count as its own; 0 for one that reads them itself.
        """
        if self.prompts is None or not torch.equal(self.prompts, prompts):
            self.prompts = prompts
            self.kept.clear()
        if model in self.kept:
            states, seconds = self.kept[model]
            cache.restore(states)
            return seconds
        if prompts.is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        cache.read(model, prompts, lengths)
        if prompts.is_cuda:
            torch.cuda.synchronize()
        self.kept[model] = cache.copied(prompts.shape[1]), time.perf_counter() - started
        return 0.0


def drop_rows(done: Sequence[bool], caches: Iterable[RowCache]) -> list[int]:
    """Drop the rows k with done[k]: the last of the others move into the gaps, in `caches` too.

    Returns the former number of each remaining row.
    """
    order = list(range(len(done) - sum(done)))
    gaps = [k for k in order if done[k]]
    sources = [k for k in range(len(order), len(done)) if not done[k]]
    for gap, source in zip(gaps, sources, strict=True):
        order[gap] = source
    for layer in [layer for cache in caches for layer in cache.layers if gaps and layer.is_initialized]:
        layer.keys[gaps], layer.values[gaps] = layer.keys[sources], layer.values[sources]
    return order
