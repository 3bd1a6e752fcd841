"""A key/value cache whose rows stand at different lengths and roll back by forgetting a length."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass
class Places:
    """Where the next forward writes. The layers share it with their cache, and hold no cache: a cycle of references
    would keep the keys and values of every finished batch until Python's collector comes by.
    """

    rows: int
    slots: int
    span: int = 0
    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))
    row_index: torch.Tensor = field(default_factory=lambda: torch.empty(0, 1, dtype=torch.long))


class RowLayer(CacheLayerMixin):
    """One layer's keys and values, [rows, heads, slots, head_dim]; slot = the token's position in its own row."""

    is_compileable = False
    is_croppable = True

    def __init__(self, places: Places):
        super().__init__()
        self._places = places

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Reserve room for every row and slot; `key_states`, `value_states` [B, heads, q, head_dim] give the shapes."""
        rows, slots = self._places.rows, self._places.slots
        # Zeros, not empty memory: a masked NaN would still spoil the attention's weighted sum.
        self.keys = key_states.new_zeros(rows, key_states.shape[1], slots, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], slots, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write [B, heads, q, head_dim] at the announced positions; return views [B, heads, span, head_dim]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, span = self._places.positions.shape[0], self._places.span
        self.keys[self._places.row_index, :, self._places.positions] = key_states.transpose(1, 2)
        self.values[self._places.row_index, :, self._places.positions] = value_states.transpose(1, 2)
        return self.keys[:batch, :, :span], self.values[:batch, :, :span]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._places.span, 0

    def get_seq_length(self) -> int:
        return self._places.span

    def get_max_length(self) -> int:
        return self._places.slots


class RowCache(Cache):
    """Preallocated cache for `rows` rows of `slots` positions, for any HF model with full attention in every layer.

    Nothing is ever cut off: a forward at positions p overwrites slots p, and the mask hides every slot after the query.
    So a rejected draft token is rolled back by feeding the next tokens at its position.
    """

    def __init__(self, rows: int, slots: int, layers: int):
        self.places = Places(rows, slots)
        super().__init__(layers=[RowLayer(self.places) for _ in range(layers)])

    def announce(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Set where the next forward writes: `positions` [B, q] of rows 0..B-1; returns its mask [B, 1, q, span].

        A query sees the slots up to its own position (0 is added), never a later one (the dtype's minimum is added).
        """
        places = self.places
        places.positions = positions
        places.row_index = torch.arange(positions.shape[0], device=positions.device)[:, None]
        places.span = int(positions.max()) + 1
        if places.span > places.slots:
            raise ValueError(
                f"position {places.span - 1} lies outside a cache of {places.slots} slots; reserve more slots"
            )
        hidden = torch.arange(places.span, device=positions.device) > positions[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
        return mask.masked_fill_(hidden, torch.finfo(dtype).min)

    def move_rows(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy rows `source` [k] over rows `destination` [k], to close the holes that finished rows leave."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[destination] = layer.keys[source]
                layer.values[destination] = layer.values[source]
