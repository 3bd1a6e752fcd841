"""Hidden states of the frozen target on disk, computed once for all processes of a training."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

MEMORY_BYTES = 1 << 30  # of features; the files hold all of them


class StoreError(RuntimeError):
    """A store of completions or features cannot be used; the message names the file."""


class FeatureStore:
    """The target's hidden states [g + 1, S] by block (ids of context and draft), in safetensors files of a folder. S is
    the hidden size, or twice that with spd.state_layer.

    Each block is forwarded once in the entire training. The states keep their dtype: bfloat16 of a bfloat16 target. On
    disk, so that a resumed run continues with the same bits: in a batch of another shape the hidden states of a block
    differ in the last digits. Several processes may share the folder: each writes files of its own, and of a block in
    two files the older one counts.
    """

    def __init__(self, folder: str | Path, target_fingerprint: str) -> None:
        """States of another target are in another subfolder. Raises StoreError where the folder cannot be made."""
        name = hashlib.sha256(f"{target_fingerprint}, g + 1 states".encode()).hexdigest()[:16]
        self.folder = Path(folder).expanduser() / name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"spd.feature_store={str(folder)!r} must name a folder: {error}.") from error
        self._memory: dict[tuple[int, ...], torch.Tensor] = {}
        self._bytes = 0
        self._files: set[str] = set()  # whose keys are known
        self._places: dict[str, Path] = {}  # key of a block -> its file

    def get_many(self, blocks: Sequence[tuple[int, ...]]) -> list[torch.Tensor | None]:
        """The states of each block, on the CPU; None where unknown."""
        while self._bytes > MEMORY_BYTES:  # before the batch is read: its own blocks are not dropped
            self._bytes -= self._memory.pop(next(iter(self._memory))).nbytes
        wanted = {_key(block): block for block in blocks if block not in self._memory}
        if any(key not in self._places for key in wanted):
            self._look_for_files()
        by_file: dict[Path, list[str]] = defaultdict(list)
        for key in wanted:
            if key in self._places:
                by_file[self._places[key]].append(key)
        for file, keys in by_file.items():
            with _opened(file) as tensors:
                for key in keys:
                    self._remember(wanted[key], tensors.get_tensor(key))
        return [self._memory.get(block) for block in blocks]

    def put_many(self, blocks: Sequence[tuple[int, ...]], states: Sequence[torch.Tensor]) -> None:
        """Keep the states [g + 1, S] of distinct blocks in a new file, which is complete when this returns."""
        # Copies: a view would keep the states of its whole batch in memory.
        pairs = zip(blocks, states, strict=True)
        tensors = {_key(b): s.detach().cpu().clone(memory_format=torch.contiguous_format) for b, s in pairs}
        file = self.folder / f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.safetensors"
        partial = file.with_suffix(".partial")
        try:
            save_file(tensors, partial)
            os.replace(partial, file)
        except (OSError, SafetensorError) as error:
            size = sum(tensor.nbytes for tensor in tensors.values())
            raise StoreError(f"{file}: {size} bytes of features were not written: {error}") from error
        self._files.add(file.name)
        for block, (key, tensor) in zip(blocks, tensors.items(), strict=True):
            self._places.setdefault(key, file)
            self._remember(block, tensor)

    def _look_for_files(self) -> None:
        """Take in the files that other processes have written since the last look, the oldest first."""
        for file in sorted(self.folder.glob("*.safetensors")):
            if file.name not in self._files:
                with _opened(file) as tensors:
                    for key in tensors.keys():  # noqa: SIM118 (no mapping)
                        self._places.setdefault(key, file)
                self._files.add(file.name)

    def _remember(self, block: tuple[int, ...], states: torch.Tensor) -> None:
        self._bytes += 0 if block in self._memory else states.nbytes
        self._memory.setdefault(block, states)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """The tensors of a file of features; StoreError where they cannot be read."""
    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        remedy = "Remove the file; its states will be recomputed."
        raise StoreError(f"features in {file} cannot be read: {error}. {remedy}") from error


def _key(block: tuple[int, ...]) -> str:
    return hashlib.sha256(np.asarray(block, dtype="<i8").tobytes()).hexdigest()
