"""Completions on disk, computed once for all processes."""

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from filelock import FileLock

from recipe.spd.scorer.features import StoreError

_BUSY_MS = 60_000  # another process may be committing
NETWORK_FILE_SYSTEMS = frozenset(
    "nfs nfs4 cifs smb2 smb3 smbfs afs ceph lustre gpfs beegfs panfs pvfs2 orangefs glusterfs fuse.sshfs "
    "fuse.glusterfs fuse.ceph-fuse fuse.s3fs fuse.gcsfuse fuse.juicefs fuse.mountpoint-s3".split()
)


def file_system(path: Path) -> str:
    """The type of the file system that holds a path, as mount names it; empty where that is unknown."""
    path, kind, innermost = path.absolute().resolve(), "", 0
    for mount in psutil.disk_partitions(all=True):
        depth = len(Path(mount.mountpoint).parts)
        if depth >= innermost and path.is_relative_to(mount.mountpoint):  # the last of equals hides the others
            kind, innermost = mount.fstype, depth
    return kind


@dataclass(frozen=True)
class Completion:
    """What the target generated after a context, without its closing EOS."""

    token_ids: tuple[int, ...]
    hit_limit: bool  # cut off by the token limit


def check_store_path(path: Path) -> None:
    """Raise StoreError for a path on a network file system."""
    if (kind := file_system(path)) in NETWORK_FILE_SYSTEMS:
        raise StoreError(
            f"store {path} lies on {kind}: the write-ahead log needs memory that its processes share, which a network "
            "file system does not give. Name a file on a local disk (spd.rollout.store_path)."
        )


class CompletionStore:
    """Completions by context, for one model fingerprint and one set of sampling parameters, in a SQLite file (WAL).

    Several processes may read and write it at once. The first value of a key stays, so that all processes use the same.
    """

    def __init__(self, path: str | Path, model_fingerprint: str, sampling: Mapping[str, Any]) -> None:
        self.path = Path(path).expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        check_store_path(self.path)
        self._salt = f"{model_fingerprint}\n{json.dumps(dict(sampling), sort_keys=True)}\n".encode()
        try:
            self._db = sqlite3.connect(
                self.path, timeout=_BUSY_MS / 1000, isolation_level=None, check_same_thread=False
            )
            # Changing the journal mode fails at once, without the busy timeout, where two processes do it together.
            with FileLock(f"{self.path}.lock"):
                for pragma in (f"busy_timeout={_BUSY_MS}", "journal_mode=WAL", "synchronous=NORMAL"):
                    self._db.execute(f"PRAGMA {pragma}")
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS completions (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"
                )
        except sqlite3.Error as error:
            raise StoreError(
                f"spd.rollout.store_path={str(self.path)!r} cannot be opened as a store: {error}. "
                "Name another file, or remove this one."
            ) from error

    def get_many(self, contexts: Sequence[Sequence[int]]) -> dict[int, Completion]:
        """Index in `contexts` -> completion, for the stored ones."""
        held = {}
        for i, ids in enumerate(contexts):
            try:
                row = self._db.execute("SELECT value FROM completions WHERE key = ?", [self._key(ids)]).fetchone()
            except sqlite3.Error as error:
                raise StoreError(f"store {self.path} cannot be read: {error}") from error
            if row is not None:
                hit_limit, *token_ids = np.frombuffer(row[0], dtype="<i4").tolist()
                held[i] = Completion(tuple(token_ids), bool(hit_limit))
        return held

    def put_many(self, contexts: Sequence[Sequence[int]], completions: Iterable[Completion]) -> list[Completion]:
        """Commit completions in one transaction; returns what the store holds for each context afterwards."""
        values = [np.asarray([done.hit_limit, *done.token_ids], dtype="<i4").tobytes() for done in completions]
        pairs = [(self._key(ids), value) for ids, value in zip(contexts, values, strict=True)]
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT OR IGNORE INTO completions VALUES (?, ?)", pairs)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            size = sum(len(value) for _, value in pairs)
            raise StoreError(
                f"store {self.path}: {len(pairs)} completions ({size} bytes) were not written: {error}"
            ) from error
        held = self.get_many(contexts)
        return [held[i] for i in range(len(pairs))]

    @property
    def size(self) -> int:
        """Bytes on disk, SQLite's write-ahead log included."""
        files = (self.path, self.path.with_name(f"{self.path.name}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        """Close the file; the store cannot be used afterwards."""
        self._db.close()

    def _key(self, ids: Sequence[int]) -> bytes:
        return hashlib.sha256(self._salt + np.asarray(ids, dtype="<i8").tobytes()).digest()
