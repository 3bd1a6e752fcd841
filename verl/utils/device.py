"""Which accelerator this process has: CUDA, or none and then the CPU."""

import os
from pathlib import Path
from types import ModuleType

import psutil
import torch

is_cuda_available = torch.cuda.is_available()
is_npu_available = False


def get_visible_devices_keyword() -> str:
    """Name of the environment variable that hides or shows accelerators."""
    return "CUDA_VISIBLE_DEVICES"


def get_device_name() -> str:
    """Either "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device_type: str) -> str:
    """The dtype of a model on "cuda" or "cpu" unless a setting names another: "bfloat16" or "float32".

    A CPU multiplies bfloat16 matrices faster than float32 ones only with instructions for their products; without
    them it widens every operand first.
    """
    if device_type == "cuda":
        return "bfloat16"
    supported = torch.cpu.get_capabilities()
    return "bfloat16" if supported.get("avx512_bf16") or supported.get("amx_bf16") else "float32"


def available_memory(device: torch.device) -> int:
    """Free bytes of a GPU; of the machine, within the limit of this process' control group, on the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = psutil.virtual_memory().available
    for group, limit, used in (("", "max", "current"), ("memory", "limit_in_bytes", "usage_in_bytes")):  # v2, v1
        files = [Path("/sys/fs/cgroup", group, f"memory.{name}") for name in (limit, used)]
        most, now = (file.read_text().strip() if file.is_file() else "max" for file in files)
        if most != "max":
            available = min(available, int(most) - int(now))
    return available


def threads_of_rank(ranks: int) -> int:
    """Threads of each of the `ranks` of this machine that compute on its CPUs at the same time."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def get_torch_device() -> ModuleType:
    """torch.cuda or torch.cpu."""
    return torch.cuda if get_device_name() == "cuda" else torch.cpu


def get_device_id() -> int:
    """Index of the current accelerator; 0 on the CPU."""
    return torch.cuda.current_device() if get_device_name() == "cuda" else 0


def rank_device_index() -> int:
    """Index of this rank's GPU among the visible ones: LOCAL_RANK, or 0 where the launcher shows it no other."""
    return 0 if torch.cuda.device_count() == 1 else int(os.environ.get("LOCAL_RANK", "0"))


def visible_device() -> str:
    """The current GPU, as CUDA_VISIBLE_DEVICES names it."""
    index, names = torch.cuda.current_device(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",")[index] if names else str(index)


def get_nccl_backend() -> str:
    """Name of the collective library for this device: nccl or gloo."""
    return "nccl" if get_device_name() == "cuda" else "gloo"


def set_expandable_segments(enable: bool) -> None:
    """Let the CUDA allocator grow its segments, or not; nothing to set on the CPU."""
    if get_device_name() == "cuda":
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{enable}")


def auto_set_device(config) -> None:
    """Replace `trainer.device: auto` by what this machine has; a device named by the user stays."""
    if config.trainer.device == "auto":
        config.trainer.device = get_device_name()


def get_device_capability(device_id: int = 0) -> tuple[int | None, int | None]:
    """(major, minor) of a CUDA device; (None, None) on the CPU."""
    return torch.cuda.get_device_capability(device_id) if get_device_name() == "cuda" else (None, None)
