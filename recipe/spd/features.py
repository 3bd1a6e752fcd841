"""Keeps the frozen target's hidden states of drafted blocks: each block is forwarded once in the whole training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from recipe.spd.store import KeyValueStore

MEMORY_BYTES = 1 << 30  # the file holds all of them


class FeatureStore:
    """Block (ids of context and draft) -> hidden states [g, H] float32, in memory and in a file beside the completions.

    On disk, so that a resumed run goes on with the very bits of the interrupted one: another batch would give a block
    hidden states that differ in the last digits.
    """

    def __init__(self, path: str | Path, target_fingerprint: str) -> None:
        self._disk = KeyValueStore(path, "features", f"{target_fingerprint}\n".encode())
        self._memory: dict[tuple[int, ...], torch.Tensor] = {}
        self._bytes = 0

    def get_many(self, blocks: Sequence[tuple[int, ...]], width: int) -> list[torch.Tensor | None]:
        """The states of each block, None where they are not known; `width` is H."""
        self._forget()
        unknown = list(dict.fromkeys(block for block in blocks if block not in self._memory))
        for i, value in self._disk.get_many(unknown).items():
            self._remember(unknown[i], value, width)
        return [self._memory.get(block) for block in blocks]

    def put_many(self, blocks: Sequence[tuple[int, ...]], states: Sequence[torch.Tensor]) -> None:
        """Keep the states [g, H] of distinct blocks; where another process was first, its states are the ones kept."""
        values = [state.detach().float().cpu().contiguous().numpy().tobytes() for state in states]
        for block, state, held in zip(blocks, states, self._disk.put_many(blocks, values), strict=True):
            self._remember(block, held, state.shape[-1])

    def _forget(self) -> None:
        """Drop the oldest blocks from memory, never those of the batch at work, until MEMORY_BYTES suffice."""
        while self._bytes > MEMORY_BYTES:
            self._bytes -= self._memory.pop(next(iter(self._memory))).nbytes

    def _remember(self, block: tuple[int, ...], value: bytes, width: int) -> None:
        self._bytes += 0 if block in self._memory else len(value)
        self._memory[block] = torch.from_numpy(np.frombuffer(value, dtype="<f4").reshape(-1, width).copy())
