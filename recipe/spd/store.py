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


class KeyValueStore:
    """A table of a sqlite file (WAL) from token ids to bytes, under a salt that says what else the values depend on.

    Several processes may read and write it at once. The first value of a key stays, so that everybody goes on with it.
    """

    def __init__(self, path: str | Path, table: str, salt: bytes) -> None:
        self.path = Path(path).expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._table, self._salt = table, salt
        try:
            self._db = sqlite3.connect(
                self.path, timeout=_BUSY_MS / 1000, isolation_level=None, check_same_thread=False
            )
            for pragma in (f"busy_timeout={_BUSY_MS}", "journal_mode=WAL", "synchronous=NORMAL"):
                self._db.execute(f"PRAGMA {pragma}")
            self._db.execute(
                f"CREATE TABLE IF NOT EXISTS {table} (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"
            )
        except sqlite3.Error as error:
            raise StoreError(
                f"spd.rollout.store_path={str(self.path)!r} cannot be opened as a store: {error}. "
                "Name another file, or remove this one."
            ) from error

    def key(self, ids: Sequence[int]) -> bytes:
        """The key of a row of token ids."""
        return hashlib.sha256(self._salt + np.asarray(ids, dtype="<i8").tobytes()).digest()

    def get_many(self, rows: Sequence[Sequence[int]]) -> dict[int, bytes]:
        """Position in `rows` -> value, for those that are stored."""
        wanted = {self.key(ids): i for i, ids in enumerate(rows)}
        if len(wanted) != len(rows):
            raise ValueError(f"{len(rows)} rows hold only {len(wanted)} distinct ones; ask for each once.")
        keys, found = list(wanted), {}
        for first in range(0, len(keys), _LOOKUP):
            part = keys[first : first + _LOOKUP]
            query = f"SELECT key, value FROM {self._table} WHERE key IN ({','.join('?' * len(part))})"
            found.update({wanted[key]: value for key, value in self._execute(query, part)})
        return found

    def put_many(self, rows: Sequence[Sequence[int]], values: Iterable[bytes]) -> list[bytes]:
        """Commit values in one transaction; gives what the store holds for each row afterwards."""
        pairs = [(self.key(ids), value) for ids, value in zip(rows, values, strict=True)]
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(f"INSERT OR IGNORE INTO {self._table} VALUES (?, ?)", pairs)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            size = sum(len(value) for _, value in pairs)
            raise StoreError(
                f"store {self.path}: {len(pairs)} {self._table} ({size} bytes) were not written: {error}"
            ) from error
        held = self.get_many(rows)
        return [held[i] for i in range(len(pairs))]

    def __len__(self) -> int:
        return self._execute(f"SELECT count(*) FROM {self._table}", [])[0][0]

    @property
    def size(self) -> int:
        """Bytes on disk of everything in the file, what sqlite has yet to move into it included."""
        files = (self.path, self.path.with_name(f"{self.path.name}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        """Close the file; the store cannot be used afterwards."""
        self._db.close()

    def _execute(self, query: str, values: Sequence[Any]) -> list[tuple]:
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"store {self.path} cannot be read: {error}") from error


class CompletionStore:
    """Completions by context, for one model fingerprint and one set of sampling parameters."""

    def __init__(self, path: str | Path, model_fingerprint: str, sampling: Mapping[str, Any]) -> None:
        salt = f"{model_fingerprint}\n{json.dumps(dict(sampling), sort_keys=True)}\n".encode()
        self._store = KeyValueStore(path, "completions", salt)

    def get_many(self, contexts: Sequence[Sequence[int]]) -> dict[int, Completion]:
        """Position in `contexts` -> completion, for those that are stored."""
        return {i: _unpack(value) for i, value in self._store.get_many(contexts).items()}

    def put_many(self, contexts: Sequence[Sequence[int]], completions: Iterable[Completion]) -> list[Completion]:
        """Commit completions in one transaction; gives what the store holds for each context afterwards."""
        return [_unpack(value) for value in self._store.put_many(contexts, map(_pack, completions))]

    def __len__(self) -> int:
        return len(self._store)

    @property
    def size(self) -> int:
        """Bytes of the file on disk."""
        return self._store.size

    def close(self) -> None:
        """Close the file."""
        self._store.close()


def _pack(done: Completion) -> bytes:
    return np.asarray([done.hit_limit, *done.token_ids], dtype="<i4").tobytes()


def _unpack(value: bytes) -> Completion:
    hit_limit, *ids = np.frombuffer(value, dtype="<i4").tolist()
    return Completion(tuple(ids), bool(hit_limit))
