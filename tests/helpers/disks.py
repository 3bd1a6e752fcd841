"""A small disk, where this user may mount one, and a file that fills it."""

import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str):
    """`folder` as a disk of its own, of `size` (64m); skips the test where no tmpfs can be mounted."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"this machine mounts no tmpfs for us: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def leave_free(disk: Path, count: int) -> Path:
    """Fill a disk, also while others write to it, up to its last `count` bytes, in whole pages; the file that does."""
    with open(disk / "filler", "wb", buffering=0) as filler:
        while (free := shutil.disk_usage(disk).free) > count:
            filler.write(b"x" * min(free - count, 1 << 20))
    return disk / "filler"
