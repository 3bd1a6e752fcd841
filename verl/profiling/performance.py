"""The peak memory of a rank."""

from pathlib import Path

import torch

GIB = 2**30


def peak_memory(device_type: str) -> dict[str, float]:
    """Metrics of the most memory that this rank has had so far, GiB: of its GPU, or of its process on a CPU."""
    if device_type == "cuda":
        sizes = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    else:  # not getrusage, whose maximum a process takes over from the one that started it
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        sizes = {"resident": int(status.partition("VmHWM:")[2].split()[0]) << 10}
    return {f"perf/max_memory_{name}_gb": size / GIB for name, size in sizes.items()}
