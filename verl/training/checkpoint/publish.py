"""Publishes a checkpoint folder atomically.

Order: write into `global_step_N.tmp`, fsync, manifest, rename to `global_step_N`, fsync the parent, replace the
tracker file, rotate. A crash between any two of these leaves the newest complete checkpoint findable.

A folder may have checkpoints of several runs. Those of the run that started last are the ones up to the step in the
tracker file that are not listed in `other_runs.json`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from loguru import logger

MANIFEST = "manifest.json"
DIGESTS = ".digests.json"  # each rank's digests of its own files, which the manifest takes in
TRACKER = "latest_checkpointed_iteration.txt"
OTHERS = "other_runs.json"  # list of the steps in the folder that the run that started last did not write
STEP_FOLDER = re.compile(r"global_step_(0|[1-9][0-9]{0,17})")
_FORMAT = 1


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; the one before it is untouched."""


class CheckpointCorruptError(RuntimeError):
    """A checkpoint's files are not what its manifest says."""


class CheckpointWriter:
    """Context manager: write into `.path`; on a clean exit the folder is published, on an exception it is removed.

    `max_to_keep` newest published steps of the run stay on the disk, this one included (None or 0: all stay).
    """

    def __init__(self, root: str | os.PathLike, step: int, max_to_keep: int | None = None):
        self.root = Path(root)
        self.step = int(step)
        self.max_to_keep = max_to_keep
        self.final = self.root / f"global_step_{self.step}"
        self.path = self.root / f"global_step_{self.step}.tmp"

    def __enter__(self) -> CheckpointWriter:
        self.root.mkdir(parents=True, exist_ok=True)
        restore_interrupted(self.root)
        clear_interrupted(self.root)
        self.path.mkdir()
        return self

    def __exit__(self, exc_type, exc, tb) -> None:
        if exc is not None:
            self._give_up(exc)
            return
        try:
            self._publish()
        except OSError as e:
            self._give_up(e)
            raise

    def _give_up(self, error: BaseException) -> None:
        """Remove what was written; report a full disk with the size of the room that the checkpoint had."""
        written = sum(f.stat().st_size for f in self.path.rglob("*") if f.is_file())
        room = written + shutil.disk_usage(self.path).free
        shutil.rmtree(self.path, ignore_errors=True)
        known = isinstance(error, CheckpointWriteError)  # has the number of bytes that are needed
        if isinstance(error, OSError) and not known and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(self.path, room + 1, room) from error

    def _publish(self) -> None:
        write_manifest(self.path)
        replaced = self.root / f"{self.final.name}.old" if os.path.lexists(self.final) else None
        if replaced is not None:  # restore_interrupted undoes this after a crash
            os.rename(self.final, replaced)
            fsync_folder(self.root)
        os.rename(self.path, self.final)
        fsync_folder(self.root)
        # A run's steps ascend: those above this one are not its own.
        above = {step for step in published_steps(self.root) if step > self.step}
        _write_others(self.root, (_others(self.root) | above) - {self.step})
        write_tracker(self.root, self.step)
        if replaced is not None:
            remove(replaced)
        if self.max_to_keep:
            rotate(self.root, self.max_to_keep, keep=self.final)
        logger.info("checkpoint published: {}", self.final)


def restore_interrupted(root: Path) -> None:
    """Brings back a folder that was set aside when its successor never arrived."""
    for aside in sorted(root.glob("global_step_*.old")):
        home = aside.with_suffix("")
        if not os.path.lexists(home):
            os.rename(aside, home)
            fsync_folder(root)


def clear_interrupted(root: Path) -> None:
    """Removes what a killed run left behind. Only a writer may: a reader could meet a save that is under way."""
    for pattern in ("global_step_*.tmp", "global_step_*.trash", "global_step_*.old", f"{TRACKER}.tmp", f"{OTHERS}.tmp"):
        for left in root.glob(pattern):
            logger.warning("removing {}, left by an interrupted save or rotation", left)
            remove(left)


def remove(path: Path) -> None:
    """Delete a file or a folder; of a symbolic link the link alone, with a warning."""
    if path.is_symlink():
        logger.warning("{} is a link to {}: the link is removed, what it points to stays", path, path.readlink())
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def published_steps(root: str | os.PathLike) -> list[int]:
    """Steps with a published folder on the disk, ascending; valid or not."""
    root = Path(root)
    if not root.is_dir():
        return []
    matches = (STEP_FOLDER.fullmatch(p.name) for p in root.iterdir() if p.is_dir())
    return sorted(int(m.group(1)) for m in matches if m)


def steps_of_run(root: str | os.PathLike) -> list[int]:
    """Published steps of the run that started last in the folder, ascending; valid or not."""
    newest, others = read_tracker(root), _others(Path(root))
    return [n for n in published_steps(root) if n not in others and (newest is None or n <= newest)]


def continued_steps(root: str | os.PathLike, resumed: Path | None) -> list[int]:
    """Published steps of a run that resumes from the folder `resumed`, global_step_N (None: from nothing)."""
    match = None if resumed is None else STEP_FOLDER.fullmatch(resumed.name)
    if match is None or resumed.parent.resolve() != Path(root).resolve():
        return []
    last, steps = int(match.group(1)), steps_of_run(root)
    return [n for n in steps if n <= last] if last in steps else [last]  # of another run, the others are not known


def begin_run(root: str | os.PathLike, resumed: Path | None) -> list[int]:
    """Makes the run that resumes from `resumed` the folder's; the published steps that are left of other runs."""
    root = Path(root)
    steps = continued_steps(root, resumed)
    others = sorted(set(published_steps(root)) - set(steps))
    _write_others(root, set(others))
    if not steps:
        (root / TRACKER).unlink(missing_ok=True)
    elif read_tracker(root) != steps[-1]:
        write_tracker(root, steps[-1])
    return others


def _others(root: Path) -> set[int]:
    file = root / OTHERS
    try:
        steps = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
        if not isinstance(steps, list) or any(type(step) is not int for step in steps):
            raise ValueError("it is not a list of steps")
    except (ValueError, RecursionError) as e:
        text = f"{file} cannot be read ({e}); remove it if all checkpoints in its folder are of one run."
        raise CheckpointCorruptError(text) from e
    return set(steps)


def _write_others(root: Path, steps: set[int]) -> None:
    if steps != _others(root):
        _replace_synced(root / OTHERS, json.dumps(sorted(steps)))


def rotate(root: str | os.PathLike, max_to_keep: int, keep: Path) -> None:
    """Removes all but the `max_to_keep` newest steps of the run; `keep` always stays."""
    root = Path(root)
    steps = steps_of_run(root)
    for step in steps[: max(0, len(steps) - max_to_keep)]:
        folder = root / f"global_step_{step}"
        if folder == keep:
            continue
        # Renamed first: a folder that is being deleted must not look like a checkpoint.
        trash = root / f"{folder.name}.trash"
        os.rename(folder, trash)
        remove(trash)
        logger.info("checkpoint rotated out: {}", folder)


def digest_files(folder: str | os.PathLike, files: Iterable[Path]) -> dict[str, tuple[int, str]]:
    """fsyncs files; {path from `folder` on: (bytes, sha256)}."""
    files = list(files)
    with ThreadPoolExecutor(max_workers=4) as pool:
        digests = list(pool.map(partial(_digest, sync=True), files))
    return {f.relative_to(folder).as_posix(): digest for f, digest in zip(files, digests, strict=True)}


def write_digests(folder: str | os.PathLike, digests: Mapping[str, tuple[int, str]]) -> None:
    """Leave digests of files below `folder`, already synced, for `write_manifest`, which does not read those again."""
    (Path(folder) / DIGESTS).write_text(json.dumps(digests))


def _take_digests(folder: Path) -> dict[str, tuple[int, str]]:
    """Digests that ranks left in the folder or below it, of files that have that size; they are removed."""
    taken = {}
    for left in list(folder.rglob(DIGESTS)):
        home = left.parent
        for name, (size, digest) in json.loads(left.read_text()).items():
            if (home / name).is_file() and (home / name).stat().st_size == size:
                taken[(home / name).relative_to(folder).as_posix()] = (size, digest)
        left.unlink()
    return taken


def write_manifest(folder: str | os.PathLike) -> None:
    """fsyncs every file and folder below, then writes manifest.json (file, bytes, sha256), synced too.

    Files whose digests were left by `write_digests` were synced by the rank that wrote them, and are not read again.
    """
    folder = Path(folder)
    digests = _take_digests(folder)
    names = {f.relative_to(folder).as_posix(): f for f in _files_of(folder)}
    digests |= digest_files(folder, (f for name, f in names.items() if name not in digests))
    entries = [{"file": name, "bytes": digests[name][0], "sha256": digests[name][1]} for name in names]
    _write_synced(folder / MANIFEST, json.dumps({"format": _FORMAT, "files": entries}, indent=1))
    for sub in [p for p in folder.rglob("*") if p.is_dir()]:
        fsync_folder(sub)
    fsync_folder(folder)


def verify_manifest(folder: str | os.PathLike, parts: Iterable[str] = ("",)) -> None:
    """Raises CheckpointCorruptError that names the first missing, incomplete, altered or unlisted file.

    `parts`: the beginnings of the files' names (from the folder on) to look at; all by default.
    """
    folder, parts = Path(folder), tuple(parts)
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise CheckpointCorruptError(f"{folder}: no {MANIFEST}; the folder was not written to its end.")
    try:
        described = json.loads(manifest.read_text(encoding="utf-8"))
        if described["format"] != _FORMAT:
            raise ValueError(f"its format is {str(described['format'])[:40]}, this version reads {_FORMAT}")
        listed = {}
        for entry in described["files"]:
            name, size, digest = entry["file"], entry["bytes"], entry["sha256"]
            if (type(name), type(size), type(digest)) != (str, int, str):
                raise ValueError(f"it lists {str(entry)[:80]}, which is not a file with its bytes and sha256")
            if name.startswith(parts):
                listed[name] = (size, digest)
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise CheckpointCorruptError(f"{manifest} cannot be read ({e}).") from e
    present = {f.relative_to(folder).as_posix(): f for f in _files_of(folder)}
    present = {name: f for name, f in present.items() if name.startswith(parts)}
    if missing := sorted(set(listed) - set(present)):
        raise CheckpointCorruptError(f"{folder / missing[0]} is missing; the manifest lists it.")
    if unlisted := sorted(set(present) - set(listed)):
        raise CheckpointCorruptError(f"{folder / unlisted[0]} is not in the manifest; remove it if it is yours.")
    for name, (size, _) in listed.items():
        actual = present[name].stat().st_size
        if actual != size:
            what = f"{present[name]} has {actual} bytes, the manifest says {size}: incomplete"
            raise CheckpointCorruptError(f"{what}. Copy it again, or name another checkpoint.")
    names = list(listed)
    with ThreadPoolExecutor(max_workers=4) as pool:
        for name, (_, digest) in zip(names, pool.map(lambda n: _digest(present[n]), names), strict=True):
            if digest != listed[name][1]:
                text = "was altered: its sha256 is not the manifest's. Copy it again."
                raise CheckpointCorruptError(f"{present[name]} {text}")


def find_valid_checkpoint(root: str | os.PathLike) -> Path | None:
    """The run's newest published folder whose manifest holds, or None; refused ones are logged by file."""
    root = Path(root)
    restore_interrupted(root)
    for step in reversed(steps_of_run(root)):
        folder = root / f"global_step_{step}"
        try:
            verify_manifest(folder)
        except CheckpointCorruptError as e:  # offered instead: the next older one
            logger.warning("checkpoint {} is refused: {}", folder.name, e)
            continue
        return folder
    return None


def write_tracker(root: str | os.PathLike, step: int) -> None:
    """Replaces latest_checkpointed_iteration.txt by one that holds `step`, atomically."""
    _replace_synced(Path(root) / TRACKER, str(step))


def read_tracker(root: str | os.PathLike) -> int | None:
    """The step in the tracker file; None without one."""
    file = Path(root) / TRACKER
    if not file.is_file():
        return None
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch("[0-9]{1,18}", text):
        raise CheckpointCorruptError(f"{file} holds {text[:40]!r} in place of a step number; remove it.")
    return int(text)


def disk_full(path: Path, needed: int, free: int | None = None) -> CheckpointWriteError:
    """The error of a full disk: path, bytes needed, bytes free (None: those that are free now)."""
    if free is None:
        free = shutil.disk_usage(next(p for p in [path, *path.parents] if p.exists())).free
    return CheckpointWriteError(
        errno.ENOSPC,
        f"no room for the checkpoint in {path}: at least {needed} bytes are needed, {free} are free. The checkpoint "
        "before it is kept. Free some space, or lower trainer.max_actor_ckpt_to_keep (SFT: max_ckpt_to_keep)",
    )


def fsync_folder(folder: Path) -> None:
    """Makes renames and new names in the folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)


def _digest(file: Path, sync: bool = False) -> tuple[int, str]:
    """(bytes, sha256) of a file."""
    with open(file, "rb") as f:
        if sync:
            os.fsync(f.fileno())
        return os.fstat(f.fileno()).st_size, hashlib.file_digest(f, "sha256").hexdigest()


def _replace_synced(file: Path, text: str) -> None:
    fresh = file.with_name(f"{file.name}.tmp")
    try:
        _write_synced(fresh, text)
        os.replace(fresh, file)
    except OSError:  # a full disk
        fresh.unlink(missing_ok=True)
        raise
    fsync_folder(file.parent)


def _write_synced(file: Path, text: str) -> None:
    with open(file, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
