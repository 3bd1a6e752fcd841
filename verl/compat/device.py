"""Compatibility with verl: import path of `verl.utils.accelerator`, and what else verl asks of a device."""

from types import ModuleType

import torch

from verl.utils.accelerator import get_device_id, get_device_name, get_nccl_backend  # noqa: F401

is_cuda_available = torch.cuda.is_available()
is_npu_available = False


def is_torch_npu_available(check_device: bool = True) -> bool:
    """Whether there is an NPU: no, they are not supported."""
    return False


def get_visible_devices_keyword() -> str:
    """Name of the environment variable that hides or shows accelerators."""
    return "CUDA_VISIBLE_DEVICES"


def get_torch_device() -> ModuleType:
    """torch.cuda or torch.cpu."""
    return torch.cuda if get_device_name() == "cuda" else torch.cpu


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
