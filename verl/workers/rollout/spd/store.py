"""Completions on disk: each distinct one is computed once, whichever process asked for it first."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_LOOKUP = 500  # keys a query: below sqlite's limit on parameters
_BUSY_MS = 60_000  # another process may be committing


@dataclass(frozen=True)
class Completion:
    """What the target wrote after a context, without its closing EOS."""

    token_ids: tuple[int, ...]
    hit_limit: bool  # it was cut off by the token limit


class StoreError(RuntimeError):
    """The completion store cannot be used; the text names the file."""


class CompletionStore:
    """A sqlite file (WAL) of completions, keyed by model fingerprint, sampling parameters and context ids.

    Several processes may read and write it at once. The first completion of a key stays; later ones are dropped, so
    that everybody goes on with the same.
    """

    def __init__(self, path: str | Path, model_fingerprint: str, sampling: Mapping[str, Any]) -> None:
        self.path = Path(path).expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._salt = f"{model_fingerprint}\n{json.dumps(dict(sampling), sort_keys=True)}\n".encode()
        try:
            self._db = sqlite3.connect(
                self.path, timeout=_BUSY_MS / 1000, isolation_level=None, check_same_thread=False
            )
            self._db.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS completions "
                "(key BLOB PRIMARY KEY, ids BLOB NOT NULL, hit_limit INTEGER NOT NULL) WITHOUT ROWID"
            )
        except sqlite3.Error as error:
            raise StoreError(
                f"spd.rollout.store_path={str(self.path)!r} cannot be opened as a completion store: {error}. "
                "Name another file, or remove this one."
            ) from error

    def key(self, context_ids: Sequence[int]) -> bytes:
        """The key of a context."""
        return hashlib.sha256(self._salt + np.asarray(context_ids, dtype="<i8").tobytes()).digest()

    def get_many(self, contexts: Sequence[Sequence[int]]) -> dict[int, Completion]:
        """Position in `contexts` -> completion, for those that are stored."""
        wanted = {self.key(ids): i for i, ids in enumerate(contexts)}
        if len(wanted) != len(contexts):
            raise ValueError(f"{len(contexts)} contexts hold only {len(wanted)} distinct ones; ask for each once.")
        keys, found = list(wanted), {}
        for first in range(0, len(keys), _LOOKUP):
            part = keys[first : first + _LOOKUP]
            query = f"SELECT key, ids, hit_limit FROM completions WHERE key IN ({','.join('?' * len(part))})"
            for key, ids, hit_limit in self._execute(query, part):
                found[wanted[key]] = Completion(tuple(np.frombuffer(ids, dtype="<i4").tolist()), bool(hit_limit))
        return found

    def put_many(self, contexts: Sequence[Sequence[int]], completions: Iterable[Completion]) -> list[Completion]:
        """Commit completions in one transaction; gives what the store holds for each context afterwards."""
        rows = [
            (self.key(ids), np.asarray(done.token_ids, dtype="<i4").tobytes(), int(done.hit_limit))
            for ids, done in zip(contexts, completions, strict=True)
        ]
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT OR IGNORE INTO completions VALUES (?, ?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise StoreError(
                f"completion store {self.path}: {len(rows)} completions were not written: {error}"
            ) from error
        held = self.get_many(contexts)
        return [held[i] for i in range(len(rows))]

    def __len__(self) -> int:
        return self._execute("SELECT count(*) FROM completions", [])[0][0]

    def close(self) -> None:
        """Close the file; the store cannot be used afterwards."""
        self._db.close()

    def _execute(self, query: str, values: Sequence[Any]) -> list[tuple]:
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"completion store {self.path} cannot be read: {error}") from error


def model_dir_fingerprint(directory: str | Path) -> str:
    """Hash of a model directory's configs with size and samples of its weight files: a retrained model differs."""
    directory = Path(directory).expanduser()
    files = sorted(
        f
        for f in directory.glob("*")
        if f.suffix in (".safetensors", ".bin") or f.name in ("config.json", "generation_config.json")
    )
    if not any(f.suffix in (".safetensors", ".bin") for f in files):
        raise StoreError(
            f"{directory} holds no weight file (*.safetensors, *.bin): name a Hugging Face model directory."
        )
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size};".encode())
        with open(file, "rb") as f:
            pieces, length = 32, 1 << 18
            if size <= pieces * length:
                digest.update(f.read())
                continue
            for i in range(pieces):
                f.seek((size - length) * i // (pieces - 1))
                digest.update(f.read(length))
    return digest.hexdigest()[:32]
