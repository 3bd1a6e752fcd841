"""The memory of this machine that is free, and what this process gives back to it."""

import ctypes
from pathlib import Path

import psutil


def available_memory(system: Path = Path("/")) -> int:
    """Bytes that new processes can take: what the machine has available, or less where a cgroup limits this process.

    File caches of a cgroup count as available. `system` is the folder of /proc and /sys.
    """
    available = psutil.virtual_memory().available
    for line in (system / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root, limit, usage, cache = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif controllers == "memory":
            root, limit, usage, cache = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                         "total_inactive_file")  # fmt: skip
        else:
            continue
        own = Path(path.strip("/"))
        for group in (own, *own.parents):  # in a container the last one, which is the container's own
            folder = system / root / group
            if not (folder / limit).is_file() or (allowed := (folder / limit).read_text().strip()) == "max":
                continue
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / usage).read_text()) - int(counts.get(cache, 0))
            available = min(available, max(0, int(allowed) - used))
    return available


def return_freed_memory() -> None:
    """Give the memory that this process has freed back to the system, where its allocator can (glibc).

    An update leaves the optimizer's state and gradients between freed activations, which keep the heap from shrinking
    by itself.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
