"""Copies files between this machine, its shared memory and HDFS, and refuses outputs that cannot be written."""

import argparse
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock
from loguru import logger

HDFS_PREFIX = "hdfs://"
RECORD_FILE = ".directory_record.txt"


def is_non_local(path: str | os.PathLike) -> bool:
    """True for a path that must be copied before it can be read."""
    return str(path).startswith(HDFS_PREFIX)


def copy_to_local(
    src: str, cache_dir: str | None = None, filelock: str = ".file.lock", verbose: bool = False,
    always_recopy: bool = False, use_shm: bool = False,
) -> str:
    """A local path of `src`: itself when it is local already, a cached copy of an hdfs:// path otherwise.

    Args:
        src: file or folder.
        cache_dir: folder of the copies; None is verl-cache in the folder for temporary files.
        filelock: name of the lock file next to the copy, by which the processes of a machine copy only once.
        verbose, always_recopy: log the copying; replace a copy that exists.
        use_shm: return a copy in /dev/shm, if the file exists and fits there.
    """
    local = copy_local_path_from_hdfs(src, cache_dir, filelock, verbose, always_recopy)
    return copy_to_shm(local) if use_shm and os.path.exists(local) else local


def copy_local_path_from_hdfs(
    src: str, cache_dir: str | None = None, filelock: str = ".file.lock", verbose: bool = False,
    always_recopy: bool = False,
) -> str:
    """`copy_to_local` without shared memory."""
    if not is_non_local(src):
        return os.path.expanduser(src)
    if src.endswith("/"):
        raise ValueError(f"{src!r}: give the path without the slash at its end")
    local = get_local_temp_path(src, cache_dir or os.path.join(tempfile.gettempdir(), "verl-cache"))
    os.makedirs(os.path.dirname(local), exist_ok=True)
    with FileLock(os.path.join(os.path.dirname(local), filelock)):
        if always_recopy and os.path.exists(local):
            shutil.rmtree(local) if os.path.isdir(local) else os.remove(local)
        if not os.path.exists(local):
            if verbose:
                logger.info(f"copying {src} to {local}")
            copy(src, local)  # projects with another storage client replace this function of the module
    return local


def copy_to_shm(src: str) -> str:
    """Copy a local file or folder to /dev/shm and return the copy; the source itself when it does not fit there."""
    shm, src = Path("/dev/shm"), os.path.expanduser(src)
    dest = get_local_temp_path(os.path.abspath(src), str(shm / "verl-cache"))
    need = sum(size for size, _ in _sizes_and_times(Path(src)).values())
    if verify_copy(src, dest):
        return dest
    if not shm.is_dir() or shutil.disk_usage(shm).free < need:
        logger.warning(f"use_shm: {src} needs {need / 1024**3:.2f} GiB, which /dev/shm does not have; read in place")
        return src
    os.makedirs(os.path.dirname(dest), exist_ok=True)
    with FileLock(dest + ".lock"):
        if not verify_copy(src, dest):  # another process may have copied it meanwhile
            shutil.rmtree(dest, ignore_errors=True)
            (shutil.copytree if os.path.isdir(src) else shutil.copy2)(src, dest)
    return dest


def verify_copy(src: str, dest: str) -> bool:
    """True when both have the same files, of the same sizes and modification times."""
    return os.path.exists(src) and os.path.exists(dest) and _sizes_and_times(Path(src)) == _sizes_and_times(Path(dest))


def _sizes_and_times(root: Path) -> dict[str, tuple[int, int]]:
    """{path relative to `root`: (size, modification time in ns)} of its files; shutil's copies keep both."""
    files = [root] if root.is_file() else [p for p in root.rglob("*") if p.is_file()]
    return {str(p.relative_to(root)): (p.stat().st_size, p.stat().st_mtime_ns) for p in files}


def md5_encode(path: str) -> str:
    """Hexadecimal digest that names a source path."""
    return hashlib.md5(path.encode(), usedforsecurity=False).hexdigest()


def get_local_temp_path(hdfs_path: str, cache_dir: str) -> str:
    """The path of `hdfs_path` in `cache_dir`: its base name in a folder of its own."""
    return os.path.join(cache_dir, md5_encode(hdfs_path), os.path.basename(hdfs_path.rstrip("/")))


def copy(src: str, dst: str, **kwargs: Any) -> str | bool:
    """Copy a file or folder, locally or to or from hdfs://. Returns the path of a local copy, True otherwise.

    Further arguments are those of shutil.copy or shutil.copytree. Raises OSError or subprocess.CalledProcessError.
    """
    if is_non_local(dst):
        _hdfs("-cp" if is_non_local(src) else "-put", "-f", src, dst)
        return True
    if is_non_local(src):
        unfinished = dst + ".part"  # so that `dst` is complete whenever it exists
        shutil.rmtree(unfinished, ignore_errors=True)
        _hdfs("-get", "-f", src, unfinished)
        os.replace(unfinished, dst)
        return True
    return (shutil.copytree if os.path.isdir(src) else shutil.copy)(src, dst, **kwargs)


def copy_into(sources: Sequence[Path], folder: str) -> None:
    """Copy files and folders into a folder, hdfs:// with the `hdfs` command; entries of the same names are replaced.

    Raises OSError or subprocess.CalledProcessError if that fails.
    """
    if is_non_local(folder):
        makedirs(folder)
        _hdfs("-put", "-f", *map(str, sources), folder)
        return
    root = Path(local_mkdir_safe(folder))
    for source in sources:
        if source.is_dir():
            shutil.rmtree(root / source.name, ignore_errors=True)
            shutil.copytree(source, root / source.name)
        else:
            shutil.copy2(source, root / source.name)


def exists(path: str, **kwargs: Any) -> bool:
    """Whether a local path or an hdfs:// one exists; further arguments are those of os.path.exists."""
    if not is_non_local(path):
        return os.path.exists(path, **kwargs)
    try:
        _hdfs("-test", "-e", path)
    except subprocess.CalledProcessError as error:
        if error.returncode != 1:  # 1: there is no such path
            raise
        return False
    return True


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: Any) -> None:
    """Create a folder and its parents, as os.makedirs does; one of hdfs:// may exist, and has no mode."""
    if is_non_local(name):
        _hdfs("-mkdir", "-p", name)
    else:
        os.makedirs(name, mode, exist_ok, **kwargs)


def _hdfs(*arguments: str) -> None:
    """Run `hdfs dfs` with these arguments."""
    command = shutil.which("hdfs")
    if command is None:
        path = next(argument for argument in reversed(arguments) if is_non_local(argument))
        raise FileNotFoundError(f"{path}: the `hdfs` command is not on PATH; use a local path instead")
    subprocess.run([command, "dfs", *arguments], check=True)


def local_mkdir_safe(path: str) -> str:
    """Create a folder and its parents; fine when another process was faster. Returns its absolute path."""
    full = os.path.abspath(os.path.expanduser(path))
    os.makedirs(full, exist_ok=True)
    return full


def check_writable(path: str | os.PathLike, is_folder: bool) -> None:
    """Raise OSError, whose text says why, if nothing can be written to a local file or folder that may not exist yet.

    One block is written to a file without a name in the nearest folder that exists, so that read-only and full disks
    are found as well. Nothing is left behind.
    """
    target = Path(path).expanduser().absolute()
    # The nearest path that is known to exist: a broken link is, by lstat; what is in an unreadable folder is not.
    for nearest in (target, *target.parents):
        try:
            os.lstat(nearest)
            break
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
    if nearest == target and not is_folder:
        if target.is_dir():
            raise IsADirectoryError(f"{target} is a folder, not a file")
        if not os.access(target, os.W_OK):
            raise PermissionError(f"{target} is read-only, or a broken link")
        if not target.is_file():
            return  # a device or a pipe
        nearest = target.parent
    if not nearest.is_dir():
        raise NotADirectoryError(f"{nearest} is not a folder")
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(bytes(4096))
    except OSError as e:
        raise OSError(f"{nearest}: {e.strerror}") from e


def output_folder(text: str) -> Path:
    """A folder that an option of a command line names (`type=` of argparse); refused if it cannot be written to."""
    return _output(text, is_folder=True)


def output_file(text: str) -> Path:
    """A file that an option of a command line names (`type=` of argparse); refused if it cannot be written."""
    return _output(text, is_folder=False)


def _output(text: str, is_folder: bool) -> Path:
    try:
        check_writable(text, is_folder)
    except OSError as e:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {e}. Name another.") from e
    return Path(text).expanduser()


# Code written for verl imports the next two; nothing here calls them.
def _record_directory_structure(folder_path: str | os.PathLike) -> str:
    """Write the names of a folder's files and sub-folders to `.directory_record.txt` in it; the path of that file."""
    record = os.path.join(folder_path, RECORD_FILE)
    Path(record).write_text("\n".join(_entries(folder_path)), encoding="utf-8")
    return record


def _check_directory_structure(folder_path: str | os.PathLike, record_file: str) -> bool:
    """Whether a folder has the files and sub-folders of its record, and no other."""
    record = Path(record_file)
    return record.exists() and record.read_text(encoding="utf-8").splitlines() == _entries(folder_path)


def _entries(folder: str | os.PathLike) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.name != RECORD_FILE)
