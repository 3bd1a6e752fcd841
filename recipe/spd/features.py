"""Keeps the frozen target's hidden states of drafted blocks: each block is forwarded once in the whole training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from verl.workers.rollout.spd.store import KeyValueStore


class FeatureStore:
    """Block (ids of context and draft) -> hidden states [g, H] float32, in memory and in a file beside the completions.

    On disk, so that a resumed run goes on with the very bits of the interrupted one: another batch would give a block
    hidden states that differ in the last digits.
    """

    def __init__(self, path: str | Path, target_fingerprint: str) -> None:
        self._disk = KeyValueStore(path, "features", f"{target_fingerprint}\n".encode())
        self._memory: dict[tuple[int, ...], torch.Tensor] = {}

    def get_many(self, blocks: Sequence[tuple[int, ...]], width: int) -> list[torch.Tensor | None]:
        """The states of each block, None where they are not known; `width` is H."""
        unknown = list(dict.fromkeys(block for block in blocks if block not in self._memory))
        for i, value in self._disk.get_many(unknown).items():
            self._memory[unknown[i]] = torch.from_numpy(np.frombuffer(value, dtype="<f4").reshape(-1, width).copy())
        return [self._memory.get(block) for block in blocks]

    def put_many(self, blocks: Sequence[tuple[int, ...]], states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Keep the states [g, H] of distinct blocks; gives what the store holds (the first writer wins)."""
        values = [state.detach().float().cpu().contiguous().numpy() for state in states]
        held = self._disk.put_many(blocks, [value.tobytes() for value in values])
        for block, value, stored in zip(blocks, values, held, strict=True):
            kept = np.frombuffer(stored, dtype="<f4").reshape(value.shape).copy()
            self._memory[block] = torch.from_numpy(kept)
        return [self._memory[block] for block in blocks]
